"""Memory: the model behind the choice of a tile, and the peak of a real run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr

from bigunet import UNetSpec, tile_image
from bigunet.errors import MemoryBudgetError
from bigunet.mosaic.budget import choose_tile, num_workers, tile_bytes

ROOT = Path(__file__).parents[1]
GIB = 2**30
SPEC = UNetSpec(levels=4, channels=16, classes=5)
CHILD = """
import sys
from pathlib import Path
import torch
from bigunet import UNetSpec
from bigunet.model import UNet
from bigunet.mosaic import segment
torch.set_num_threads(2)
net = UNet(UNetSpec(levels=4, channels=4, classes=5))
segment(net, sys.argv[1], out=sys.argv[2], tile=512, precision="fp32", progress=False)
for line in Path("/proc/self/status").read_text().splitlines():
    if line.startswith("VmHWM:"):
        print(int(line.split()[1]) * 1024)
"""


def peak(scene: Path, out: Path) -> int:
    """Peak resident bytes of a process that makes this mosaic, torch included."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", CHILD, str(scene), str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def test_memory_does_not_grow_with_the_scene(tmp_path: Path) -> None:
    """16 times the pixels, 48 MiB against 3 MiB of them: at most 150 MiB more, 0.9 GiB in all.

    The scene's fp32 pixels alone would take 192 MiB, its first layer's maps 256 MiB.
    """
    found = {}
    for side in (1024, 4096):
        scene = tmp_path / f"scene-{side}.zarr"
        array = zarr.create_array(
            str(scene),
            shape=(3, side, side),
            chunks=(3, 512, 512),
            dtype="uint8",
            dimension_names=("band", "y", "x"),
        )
        for y in range(0, side, 512):
            row = np.arange(side, dtype=np.uint32).astype(np.uint8)
            array[:, y : y + 512] = np.broadcast_to(row, (3, 512, side))
        found[side] = peak(scene, tmp_path / f"mosaic-{side}.zarr")
    assert found[4096] < 0.9 * GIB
    assert found[4096] - found[1024] < 150 * 2**20


def test_the_largest_live_maps_are_counted() -> None:
    """At the first decoder block: skip, up-sampled map and their concatenation, and its output."""
    tile = tile_image((4096, 4096), 512, SPEC)[9]
    side = 512 + 2 * SPEC.margins.decoder_in[0]
    by_hand = (16 * 608**2 + 2 * 16 * 608**2) * 4  # encoder: skip, input and output of level 0
    assert by_hand < tile_bytes(SPEC, tile, "fp32") < 3 * by_hand
    assert side**2 * 64 * 4 < tile_bytes(SPEC, tile, "fp32")
    assert tile_bytes(SPEC, tile, "bf16") < 0.75 * tile_bytes(SPEC, tile, "fp32")
    two = tile_bytes(SPEC, tile, "fp32", batch=2)
    assert two == pytest.approx(2 * tile_bytes(SPEC, tile, "fp32"), rel=1e-6)


@pytest.mark.parametrize(
    ("levels", "shape", "budget", "expected"),
    [
        (4, (10_000, 10_000), 8 * GIB, (512, 512)),  # halo 46: 608^2 / 512^2 = 1.41
        (5, (10_000, 10_000), 8 * GIB, (1024, 1024)),  # halo 94: 704^2 / 512^2 = 1.89
        (5, (10_000, 10_000), GIB // 4, (512, 512)),
        (5, (10_000, 10_000), GIB // 8, (256, 256)),
        (5, (100, 9000), 8 * GIB, (112, 512)),
        (5, (70, 33), 8 * GIB, (64, 48)),
    ],
)
def test_the_tile_follows_halo_memory_and_image(
    levels: int, shape: tuple[int, int], budget: int, expected: tuple[int, int]
) -> None:
    spec = SPEC.replace(levels=levels)
    halo = spec.halo_aligned
    found = choose_tile(shape, spec, precision="fp32", halo=halo, budget_bytes=budget)
    assert found == expected


def test_no_room_for_the_smallest_tile() -> None:
    with pytest.raises(MemoryBudgetError, match=r"a tile of 8 x 8 needs .* Free memory"):
        choose_tile((999, 999), SPEC, precision="fp32", halo=48, budget_bytes=1000)


def test_workers_share_threads_within_memory() -> None:
    assert num_workers(8, 100, GIB, 100 * GIB) == (8, 1)
    assert num_workers(8, 100, GIB, 4 * GIB) == (4, 2)
    assert num_workers(8, 3, GIB, 100 * GIB) == (3, 2)
    assert num_workers(2, 100, GIB, GIB // 2) == (1, 2)
