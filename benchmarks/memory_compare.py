"""Memory predicted, traced, measured and published, with ratios.

Run: `python benchmarks/memory_compare.py`.

`--trace-published` also traces torchgpipe's (6, 72) network under fake tensors (about a minute).
"""

from __future__ import annotations

import argparse

from bigunet.measure import compare_memory
from bigunet.memory import peak_bytes, published_memory
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tracing import trace_peak

__all__ = ["main"]

GIB = 2**30
CASES = {
    "5 levels, 16 channels": (UNetSpec(channels=16), (1, 3, 256, 256), TrainSpec()),
    "the same, recomputed": (UNetSpec(channels=16), (1, 3, 256, 256), TrainSpec(recompute="block")),
    "the same, autocast": (
        UNetSpec(channels=16),
        (1, 3, 256, 256),
        TrainSpec(precision="bf16-autocast"),
    ),
    "batch norm, SGD": (
        UNetSpec(channels=16, norm="batch"),
        (4, 3, 128, 128),
        TrainSpec(optimiser="sgd"),
    ),
    "torchgpipe (2, 16)": (UNetSpec.torchgpipe(2, 16), (2, 3, 192, 192), TrainSpec()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace-published", action="store_true")
    options = parser.parse_args()
    print(f"{'published, P40':24}{'GiB':>9}{'predicted':>11}{'ratio':>8}{'tensors alone':>15}")
    for row in published_memory():
        print(
            f"{row.experiment:24}{row.memory_gib:9.1f}{row.predicted_gib:11.2f}{row.ratio:8.3f}"
            f"{row.tensors_gib:15.2f}"
        )
    print(f"\n{'CPU step':24}{'traced MiB':>12}{'ratio':>8}{'measured MiB':>14}{'ratio':>8}")
    for name, (spec, shape, train) in CASES.items():
        found = compare_memory(spec, shape, train)
        observed, ratio = found.observed.values / 2**20, found.ratio.values
        print(f"{name:24}{observed[0]:12.1f}{ratio[0]:8.4f}{observed[1]:14.1f}{ratio[1]:8.3f}")
    if options.trace_published:
        spec, shape = UNetSpec.torchgpipe(6, 72), (32, 3, 192, 192)
        train = TrainSpec(optimiser="sgd", weight_decay=0.0)
        predicted = peak_bytes(spec, shape, train)[0]
        traced = trace_peak(spec, shape, train)["total"]
        print(
            f"\n(6, 72), gradients set to none: predicted {predicted / GIB:.2f} GiB, traced "
            f"{traced / GIB:.2f} GiB, ratio {predicted / traced:.4f}"
        )


if __name__ == "__main__":
    main()
