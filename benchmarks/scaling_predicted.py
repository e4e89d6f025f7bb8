"""Predicted against measured: sample-parallel steps on 1 and 2 ranks of one thread each.

    python benchmarks/scaling_predicted.py [--rounds 3] [--quick] [--json]

Calibrates this machine (`bigunet.here`), times layers with as many ranks at work as a step has,
predicts with `bigunet.scaling.predict`, and measures the steps in turn. Needs two idle cores, and
less than five minutes.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from bigunet.here import here
from bigunet.scaling_check import ScalingCase, check_scaling
from bigunet.spec import TrainSpec, UNetSpec

#: Networks x tiles; images of 4 or 6 tiles, and one of 3, which two ranks cannot share evenly.
CASES = {
    "4 levels x 16, 4 of 256": (UNetSpec(levels=4, channels=16, classes=6), 256, (512, 512)),
    "4 levels x 16, 6 of 128": (UNetSpec(levels=4, channels=16, classes=6), 128, (256, 384)),
    "3 levels x 32, 4 of 192": (UNetSpec(levels=3, channels=32, classes=6), 192, (384, 384)),
    "3 levels x 32, 3 of 128": (UNetSpec(levels=3, channels=32, classes=6), 128, (128, 384)),
    "5 levels x 16, 4 of 192": (UNetSpec(levels=5, channels=16, classes=6), 192, (384, 384)),
    "batch norm, 4 of 192": (
        UNetSpec(levels=4, channels=16, classes=6, norm="batch"), 192, (384, 384),
    ),
    "bilinear, 4 of 192": (
        UNetSpec(levels=3, channels=16, classes=6, up="bilinear"), 192, (384, 384),
    ),
    "wide, 4 of 64": (UNetSpec(levels=4, channels=64, classes=6), 64, (128, 128)),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="three cases")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    args = parser.parse_args()
    chosen = list(CASES.items())[:3] if args.quick else list(CASES.items())
    for ranks in (1, 2):
        here(ranks, refresh=True)
    cases = {name: ScalingCase(s, TrainSpec(tile=t), shape) for name, (s, t, shape) in chosen}
    table = check_scaling(cases, rounds=args.rounds)
    errors = np.abs(table["ratio"].values - 1)
    totals = {"largest error": float(errors.max()), "median error": float(np.median(errors))}
    if args.json:
        print(json.dumps({**totals, "table": table.to_dict()}))
        return
    for case in table["case"].values:
        for gpus in table["gpus"].values:
            one = table.sel(case=case, gpus=gpus)
            terms = dict(zip(table.term.values, 1e3 * one["terms"].values, strict=True))
            print(
                f"{case:26} {gpus} ranks: predicted {float(one.predicted_seconds.median()):.3f} s, "
                f"measured {float(one.measured_seconds.median()):.3f} s, "
                f"ratio {float(one.ratio):.3f}; "
                + ", ".join(f"{k} {v:.0f}" for k, v in terms.items() if v >= 0.5)
                + " ms"
            )
    for key, value in totals.items():
        print(f"{key}: {100 * value:.1f} %")


if __name__ == "__main__":
    main()
