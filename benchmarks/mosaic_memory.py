"""Memory and time of a mosaic: a 10,000 x 10,000 scene on disk, 4 levels, 16 channels.

Each run is a process of its own; its peak resident memory is the kernel's figure (VmHWM), torch
and all other libraries included. The scene is written to a temporary folder first (not measured).

The two smaller sizes alternate; on a busy machine, the ratio of CPU seconds is the one to look at.

    python benchmarks/mosaic_memory.py            # 10,000, 8,192 and 4,096 squared
    python benchmarks/mosaic_memory.py --quick    # 4,096, 2,048 and 1,024 squared
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import zarr

CHILD = """
import json, sys, time
from pathlib import Path
import torch
from bigunet import UNetSpec
from bigunet.model import UNet
from bigunet.mosaic import segment
from bigunet.scenes import Normalise, open_scene

def peak():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024

scene, out, side, precision, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
torch.manual_seed(0)
net = UNet(UNetSpec(levels=4, channels=16, classes=5))
data = open_scene(scene)[:, :int(side), :int(side)]
base = peak()
began, worked = time.perf_counter(), time.process_time()
mosaic = segment(net, data, out=out, precision=precision, progress=False,
                 normalise=Normalise((120.0,) * 3, (60.0,) * 3))
print(json.dumps({"seconds": time.perf_counter() - began,
                  "cpu_seconds": time.process_time() - worked, "peak_bytes": peak(),
                  "before_bytes": base, "tile": mosaic.attrs["tile"],
                  "precision": mosaic.attrs["precision"]}))
"""


def write_scene(path: Path, side: int) -> None:
    """Seeded noise over slow waves, uint8, chunks of 1024 squared."""
    array = zarr.create_array(
        str(path),
        shape=(3, side, side),
        chunks=(3, 1024, 1024),
        dtype="uint8",
        dimension_names=("band", "y", "x"),
    )
    for y in range(0, side, 1024):
        rows = np.arange(y, min(y + 1024, side))
        noise = np.random.default_rng(y).integers(0, 100, (3, rows.size, side), dtype=np.uint8)
        wave = 70 + 70 * np.sin(rows / 200)[:, None] * np.sin(np.arange(side) / 300)
        array[:, y : y + rows.size] = noise + wave.astype(np.uint8)


def measure(scene: Path, out: Path, side: int, precision: str, threads: int) -> dict[str, Any]:
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-c", CHILD, str(scene), str(out), str(side), precision]
    done = subprocess.run(
        [*command, str(threads)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr)
    return {"side": side, **json.loads(done.stdout.splitlines()[-1])}


def median(rows: list[dict[str, Any]], side: int, clock: str) -> float:
    return statistics.median(row[clock] for row in rows if row["side"] == side)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", default="auto", choices=["auto", "fp32", "bf16"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=2, help="of the two smaller sizes")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--quick", action="store_true", help="4096, 2048 and 1024 squared")
    args = parser.parse_args()
    sides = [4096, 2048, 1024] if args.quick else [10_000, 8192, 4096]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        scene = Path(folder) / "scene.zarr"
        write_scene(scene, max(sides))
        for i, side in enumerate([sides[0], *sides[1:] * args.rounds]):
            out = Path(folder) / f"mosaic-{i}.zarr"
            rows.append(measure(scene, out, side, args.precision, args.threads))
    ratios = {
        clock: median(rows, sides[1], clock) / median(rows, sides[2], clock)
        for clock in ("seconds", "cpu_seconds")
    }
    result = {"rows": rows, "ratios": ratios, "sides": sides[1:]}
    if args.json:
        print(json.dumps(result, indent=1))
        return
    print(
        f"{'side':>6} {'tile':>5} {'precision':>9} "
        f"{'s':>7} {'CPU s':>7} {'MP/s':>6} {'peak GiB':>9}"
    )
    for row in rows:
        speed = row["side"] ** 2 / 1e6 / row["seconds"]
        print(
            f"{row['side']:6} {row['tile'][0]:5} {row['precision']:>9} {row['seconds']:7.1f} "
            f"{row['cpu_seconds']:7.1f} "
            f"{speed:6.2f} {row['peak_bytes'] / 2**30:9.2f}"
        )
    print(
        f"{sides[1]} squared over {sides[2]} squared: {ratios['seconds']:.2f} of the time, "
        f"{ratios['cpu_seconds']:.2f} of the CPU seconds"
    )


if __name__ == "__main__":
    main()
