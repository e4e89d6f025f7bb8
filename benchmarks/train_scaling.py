"""Two ranks of one thread against one rank of one thread: the same exact step, timed.

    python benchmarks/train_scaling.py [--size 2048] [--tile 512] [--repeats 3]

Strong scaling: the work is one whole-image step, dealt to the ranks. Both counts alternate and the
best time of each counts; starting processes is not part of it. Needs as many free cores as ranks.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from bigunet.launch import launch
from bigunet.model import UNet
from bigunet.ranks import current
from bigunet.sample_parallel import exact_step
from bigunet.spec import UNetSpec
from bigunet.tiles import tile_image


def steps(size: int, tile: int, repeats: int, precision: str) -> list[float]:
    """Seconds of each step after one to warm up, from when all ranks are ready."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    image = rng.standard_normal((3, size, size), np.float32)
    labels = rng.integers(0, 5, (size, size), np.uint8)
    spec = UNetSpec(levels=4, channels=16, classes=5)
    torch.manual_seed(0)
    model = UNet(spec).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    tiles = tile_image((size, size), tile, spec)
    seconds = []
    for repeat in range(repeats + 1):
        current().wait()
        began = time.perf_counter()
        exact_step(
            model,
            image,
            labels,
            tiles if repeat else tiles[: current().size],
            precision=precision,  # type: ignore[arg-type]
        )
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--tile", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16-autocast"))
    options = parser.parse_args()
    # Ranks import this file by its name, from its folder.
    import train_scaling

    args = (options.size, options.tile, options.repeats, options.precision)
    best: dict[int, float] = {}
    for _ in range(options.rounds):
        for ranks in (1, options.ranks):
            times = launch(
                train_scaling.steps, args, ranks=ranks, threads_per_rank=1, progress=False
            )
            best[ranks] = min(best.get(ranks, np.inf), *times)
    row = {
        **vars(options),
        "seconds_1_rank": round(best[1], 2),
        f"seconds_{options.ranks}_ranks": round(best[options.ranks], 2),
        "speed_up": round(best[1] / best[options.ranks], 3),
        "script": Path(__file__).name,
    }
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
