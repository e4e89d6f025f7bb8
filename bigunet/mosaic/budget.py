"""How much memory a tile takes, and which tile fits.

The model: while a layer runs, its input, its output and the skips still open are in memory; the
tile's pixels wait once more in the queue in front of the network. oneDNN's scratch space and the
allocator's slack are a stated factor.
"""

from __future__ import annotations

import psutil
import torch

from bigunet.errors import MemoryBudgetError, fail
from bigunet.geometry import padded_size
from bigunet.layers import layer_table
from bigunet.spec import UNetSpec
from bigunet.tiles import Tile, tile_image

__all__ = ["MAX_TILE", "available_bytes", "choose_tile", "num_workers", "tile_bytes"]

MAX_TILE = 2048
#: Scratch space and allocator slack over the live maps.
_SLACK = 1.25
#: A tile is large enough once the network reads at most this many pixels a pixel that it writes:
#: from there on, memory grows faster than the time falls.
_READ_RATIO = 1.5


def available_bytes(device: torch.device) -> int:
    """Free memory of the device: CUDA's own figure, or what the system can hand out."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def tile_bytes(spec: UNetSpec, tile: Tile, precision: str, batch: int = 1) -> int:
    """Peak bytes of one batch of tiles in the network, by the model above."""
    size = {"bf16": 2, "fp32": 4, "fp64": 8}[precision]
    rows = layer_table(spec, (batch, spec.in_channels, *tile.read.shape), tile=tile)
    open_skips: dict[str, int] = {}
    peak = 0

    def elements(shape: tuple[int, int, int, int]) -> int:
        return shape[0] * shape[1] * shape[2] * shape[3]

    for row in rows:
        inner, outer = elements(row.in_shape), elements(row.out_shape)
        if row.kind == "skip":
            open_skips[row.name] = outer
        # The last map, and the class scores that the labels are chosen from, are fp32 at least.
        width = max(size, 4) * 2 if row.kind == "head" else size
        peak = max(peak, (sum(open_skips.values()) + inner) * size + outer * width)
        if row.kind == "concat" and row.source is not None:
            open_skips.pop(row.source)
    pixels = elements((batch, spec.in_channels, *tile.read.shape)) * (4 + size)
    return int(peak * _SLACK) + 2 * pixels


def _middle(shape: tuple[int, int], core: tuple[int, int], spec: UNetSpec, halo: int) -> Tile:
    """The tile of the largest read box: one with neighbours on as many sides as there can be."""
    near = tuple(min(n, 3 * c) for n, c in zip(shape, core, strict=True))
    tiles = tile_image((near[0], near[1]), core, spec, halo=halo)
    return max(tiles, key=lambda tile: tile.read.area)


def choose_tile(
    shape: tuple[int, int],
    spec: UNetSpec,
    *,
    precision: str,
    halo: int,
    budget_bytes: int,
    batch: int = 1,
) -> tuple[int, int]:
    """The core (height, width) to use: a power of two times the stride, at most 2048.

    The smallest one at which a tile in the middle reads at most 1.5 times the pixels it writes,
    or the largest one that fits `budget_bytes`; never larger than the padded image.

    Raises
    ------
    MemoryBudgetError : where not even a tile of one stride fits.
    """
    stride = spec.stride
    padded = padded_size(shape[0], stride), padded_size(shape[1], stride)
    chosen: tuple[int, int] | None = None
    side = stride
    while side <= max(MAX_TILE, stride):
        core = min(side, padded[0]), min(side, padded[1])
        tile = _middle(shape, core, spec, halo)
        need = tile_bytes(spec, tile, precision, batch)
        if need > budget_bytes:
            if chosen is None:
                fail(
                    MemoryBudgetError,
                    rule=f"a tile of {core[0]} x {core[1]} needs {need / 2**30:.1f} GiB",
                    got=f"{budget_bytes / 2**30:.1f} GiB free for tiles",
                    remedy="Free memory, or use a network with fewer channels.",
                )
            break
        chosen = core
        if tile.read.area <= _READ_RATIO * tile.core.area or core == padded:
            break
        side *= 2
    assert chosen is not None
    return chosen


def num_workers(
    num_threads: int, num_units: int, bytes_per_tile: int, budget_bytes: int
) -> tuple[int, int]:
    """(tiles computed at a time, threads for each), on CPUs.

    Tiles side by side with one thread each beat all threads on one tile: they never wait for each
    other. Memory decides how many there can be; threads left over are shared out.
    """
    fit = max(1, budget_bytes // max(1, bytes_per_tile))
    workers = max(1, min(num_threads, num_units, fit))
    return workers, max(1, num_threads // workers)
