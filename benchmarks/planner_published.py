"""torchgpipe's published speed-ups beside the simulated ones, nothing fitted.

    python benchmarks/planner_published.py

U-Net (5, 64) on 1, 2 and 4 Tesla P40 with torchgpipe's hand-tuned balances. The P40's figures are
its data sheet's; see `bigunet.machines`.
"""

from __future__ import annotations

import csv
import importlib.resources
from itertools import accumulate, pairwise

from bigunet.cost import RooflineCost
from bigunet.layers import layer_table
from bigunet.machines import machine
from bigunet.plan import Plan
from bigunet.simulate import simulate
from bigunet.spec import TrainSpec, UNetSpec

SPEC = UNetSpec.torchgpipe(5, 64)


def main() -> None:
    p40 = machine("p40")
    cost = RooflineCost(p40.processor)
    source = importlib.resources.files("bigunet") / "data/published/torchgpipe_unet_speed.csv"
    lines = source.read_text(encoding="utf-8").splitlines()
    first = 0.0
    print("experiment    images/s (published)    speed-up (published)    ratio")
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        batch = int(row["batch"])
        table = layer_table(SPEC, (batch, 3, 192, 192))
        sizes = [int(n) for n in row["balance_in_flat_layers"].split(";") if n] or [len(table)]
        cuts = [0, *accumulate(sizes)]
        plan = Plan(
            spec=SPEC,
            train=TrainSpec(recompute="except_last" if row["chunks"] else "none"),
            shape_BCHW=(batch, 3, 192, 192),
            stages=tuple((table[a].name, table[b - 1].name) for a, b in pairwise(cuts)),
            devices=tuple(range(len(sizes))),
            micro_batches=int(row["chunks"] or 1),
            skips="direct",
            machine="p40",
        )
        rate = batch / simulate(plan, cost, p40).attrs["step_seconds"]
        first = first or rate
        theirs = float(row["speed_up"])
        print(
            f"{row['experiment']:12s}  {rate:6.2f} ({row['samples_per_second']})"
            f"          {rate / first:.3f} ({theirs})           {rate / first / theirs:.3f}"
        )


if __name__ == "__main__":
    main()
