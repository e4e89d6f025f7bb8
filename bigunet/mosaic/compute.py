"""Tiles through the network: read, compute, compare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from bigunet.mosaic.network import TileNetwork
from bigunet.mosaic.pyramid import IGNORE
from bigunet.mosaic.run import Array, Run, Unit
from bigunet.mosaic.settings import Settings, read_window
from bigunet.mosaic.stream import stream
from bigunet.scenes import Normalise, valid_block
from bigunet.tiles import Box, Tile, tile_image

__all__ = ["Part", "probe", "read_tile", "results"]

#: Tiles that a smaller halo is compared on.
_PROBED = 4


class Part(NamedTuple):
    """One tile's result: labels (y, x), probabilities (class, y, x), number of ignored pixels."""

    tile: Tile
    labels: Array
    shares: Array | None
    ignored: int


def read_tile(
    scene: xr.DataArray,
    tile: Tile,
    normalise: Normalise | None,
    dtype: Any = np.float32,
) -> tuple[Array, Array]:
    """A tile's pixels (band, *tile.read.shape), ready for the network, and which of its written
    pixels count.

    Pixels without data take the band's mean, 0 after normalisation. What lies outside the image
    repeats its last row and column.
    """
    height, width = scene.sizes["y"], scene.sizes["x"]
    box = tile.read.clip(Box(0, height, 0, width))
    block = read_window(scene, box.y0, box.y1, box.x0, box.x1)
    nodata = scene.attrs.get("nodata", None if normalise is None else normalise.nodata)
    valid = valid_block(block, nodata)
    with np.errstate(invalid="ignore", over="ignore"):
        pixels = block.astype(dtype) if normalise is None else normalise.apply(block)
    if not valid.all():
        pixels[:, ~valid] = 0
    bottom, right = tile.read.y1 - box.y1, tile.read.x1 - box.x1
    if bottom or right:
        pixels = np.pad(pixels, ((0, 0), (0, bottom), (0, right)), mode="edge")
    return pixels, valid[tile.write.within(box).slices]


def _input_dtype(settings: Settings) -> Any:
    return np.float64 if settings.precision == "fp64" else np.float32


def results(run: Run, network: TileNetwork, done: set[int]) -> Iterator[tuple[int, list[Part]]]:
    """(number of the unit, its tiles with labels, probabilities and ignored pixels), as ready."""
    dtype = _input_dtype(run.settings)

    def read(item: tuple[int, Unit]) -> tuple[Tensor, list[Array]]:
        pairs = [read_tile(run.scene, tile, run.net.normalise, dtype) for tile in item[1]]
        x = torch.from_numpy(np.stack([pixels for pixels, _ in pairs]))
        return x, [valid for _, valid in pairs]

    def compute(item: tuple[int, Unit], data: tuple[Tensor, list[Array]]) -> list[Part]:
        x, valid = data
        labels, shares = network.answer(x, item[1][0], run.settings.probabilities)
        out = []
        for i, (tile, there) in enumerate(zip(item[1], valid, strict=True)):
            share = None if shares is None else shares[i]
            ignored = int(there.size - np.count_nonzero(there))
            if ignored:
                labels[i][~there] = IGNORE
                if share is not None:
                    share[:, ~there] = 0 if share.dtype == np.uint8 else np.nan
            out.append(Part(tile, labels[i], share, ignored))
        return out

    def describe(item: tuple[int, Unit]) -> str:
        boxes = (t.write for t in item[1])
        return "; ".join(f"tile rows {b.y0}:{b.y1}, columns {b.x0}:{b.x1}" for b in boxes)

    threads = torch.get_num_threads()
    todo = [(i, unit) for i, unit in enumerate(run.units) if i not in done]
    flow = stream(
        todo,
        read,
        compute,
        workers=run.workers,
        on_start=lambda: torch.set_num_threads(run.settings.threads),
        describe=describe,
    )
    try:
        for (i, _), result in flow:
            yield i, result
    finally:
        flow.close()  # type: ignore[attr-defined]
        torch.set_num_threads(threads)


def probe(run: Run, network: TileNetwork) -> dict[str, Any]:
    """How far a smaller halo's result is from the exact one, on a few tiles spread evenly."""
    spec, settings = run.net.spec, run.settings
    if run.exact or not spec.tile_exact:
        return {}
    exact = {t.index: t for t in tile_image(run.shape, settings.tile, spec)}
    tiles = [tile for unit in run.units for tile in unit]
    chosen = sorted({int(i) for i in np.linspace(0, len(tiles) - 1, _PROBED + 2)[1:-1]})
    largest, differing, pixels = 0.0, 0, 0
    for small in (tiles[i] for i in chosen):
        logits = []
        for tile in (small, exact[small.index]):
            x, _ = read_tile(run.scene, tile, run.net.normalise, _input_dtype(settings))
            logits.append(network.logits(torch.from_numpy(x[None]), tile))
        one, other = logits
        largest = max(largest, float((one - other).abs().max()))
        if spec.classes == 1:
            labels = [value > 0 for value in logits]
        else:
            labels = [value.argmax(1) for value in logits]
        differing += int((labels[0] != labels[1]).sum())
        pixels += labels[0].numel()
    return {
        "max_logit_difference": largest,
        "label_disagreement": differing / pixels,
        "probed_tiles": len(chosen),
    }
