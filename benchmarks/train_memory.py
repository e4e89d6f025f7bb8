"""Peak memory of one exact training step over a large image on disk.

    python benchmarks/train_memory.py [--size 10000] [--tile 512]

Writes a random image and its labels to a temporary folder (NumPy files, read as memory maps),
runs one exact step over all of it in one process, and prints the process' peak resident memory
(`VmHWM`), torch and Python included. Pages of the mapped files count while they are resident.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from bigunet.model import UNet
from bigunet.sample_parallel import exact_step
from bigunet.scenes import Normalise, open_labels, open_scene
from bigunet.spec import UNetSpec
from bigunet.tiles import tile_image


def peak_bytes() -> int:
    """The process' peak resident memory, from Linux' own account."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM: this benchmark needs Linux")


def write_scene(folder: Path, size: int) -> tuple[Path, Path]:
    """Random bytes, row block by row block, so that writing them needs little memory."""
    rng = np.random.default_rng(0)
    image_path, labels_path = folder / "image.npy", folder / "labels.npy"
    image = np.lib.format.open_memmap(image_path, "w+", np.uint8, (3, size, size))
    labels = np.lib.format.open_memmap(labels_path, "w+", np.uint8, (size, size))
    for y in range(0, size, 256):
        rows = min(256, size - y)
        image[:, y : y + rows] = rng.integers(0, 256, (3, rows, size), np.uint8)
        labels[y : y + rows] = rng.integers(0, 5, (rows, size), np.uint8)
        image.flush()
        labels.flush()
    return image_path, labels_path


def measure(size: int, tile: int, levels: int, channels: int, precision: str) -> dict[str, object]:
    """One step; the scene is written before the peak is reset by a fresh start of the count."""
    spec = UNetSpec(levels=levels, channels=channels, classes=5)
    with tempfile.TemporaryDirectory() as name:
        image_path, labels_path = write_scene(Path(name), size)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to what is resident now
        torch.manual_seed(0)
        model = UNet(spec)
        began = time.perf_counter()
        result = exact_step(
            model,
            open_scene(image_path),
            open_labels(labels_path),
            tile_image((size, size), tile, spec),
            normalise=Normalise((127.5,) * 3, (73.9,) * 3),
            precision=precision,  # type: ignore[arg-type]
        )
        seconds = time.perf_counter() - began
    return {
        "size": size,
        "tile": tile,
        "levels": levels,
        "channels": channels,
        "precision": precision,
        "peak_gib": round(peak_bytes() / 2**30, 3),
        "seconds": round(seconds, 1),
        "pixels": result.pixels,
        "loss": round(result.loss, 4),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, default=10_000)
    parser.add_argument("--tile", type=int, default=512)
    parser.add_argument("--levels", type=int, default=4)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16-autocast"))
    options = parser.parse_args()
    print(json.dumps(measure(**vars(options)), indent=1))


if __name__ == "__main__":
    main()
