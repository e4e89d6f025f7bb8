"""Half the resolution, by the pixel: labels by majority vote, imagery by averaging."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["IGNORE", "average", "majority"]

Array = np.ndarray[Any, np.dtype[Any]]

#: Label of pixels that carry no class, in every mosaic.
IGNORE = 255


def _quads(block: Array, fill: Any) -> tuple[Array, Array, Array, Array]:
    """The four pixels of every 2 x 2 square along the last two axes, padded with `fill`."""
    height, width = block.shape[-2:]
    if height % 2 or width % 2:
        sides = [(0, 0)] * (block.ndim - 2) + [(0, height % 2), (0, width % 2)]
        block = np.pad(block, sides, constant_values=fill)
    return (
        block[..., 0::2, 0::2],
        block[..., 0::2, 1::2],
        block[..., 1::2, 0::2],
        block[..., 1::2, 1::2],
    )


def majority(labels: Array) -> Array:
    """The most frequent label of each 2 x 2 square of (y, x); ties go to the smaller id.

    `IGNORE` does not vote unless nothing else is there; neither do pixels outside the image.
    """
    a, b, c, d = _quads(labels, IGNORE)
    # Four values in order, by a sorting network; the ignored ones come last.
    a, b = np.minimum(a, b), np.maximum(a, b)
    c, d = np.minimum(c, d), np.maximum(c, d)
    a, c = np.minimum(a, c), np.maximum(a, c)
    b, d = np.minimum(b, d), np.maximum(b, d)
    b, c = np.minimum(b, c), np.maximum(b, c)
    # A pair at the front wins or ties as the smaller; else the first pair there is; else the front.
    upper = np.where((c == d) & (c != IGNORE), c, a)
    later = np.where((b == c) & (b != IGNORE), b, upper)
    return np.where(a == b, a, later).astype(labels.dtype)


def average(block: Array, nodata: float | None = None) -> Array:
    """The mean of each 2 x 2 square of (band, y, x), in the block's dtype, halves rounded up.

    Pixels outside the image, NaN and nodata do not count; a square with nothing else gets nodata,
    NaN, or 0.
    """
    kind = block.dtype.kind
    height, width = block.shape[-2:]
    if nodata is None and kind in "iu" and height % 2 == width % 2 == 0:
        # The same, several times as fast.
        wide = np.int64 if block.dtype.itemsize > 2 else np.int32
        quads = _quads(block, 0)
        whole = np.add(quads[0], quads[1], dtype=wide)
        for quad in quads[2:]:
            whole += quad
        return ((whole + 2) >> 2).astype(block.dtype)
    values = block.astype(np.float32 if block.dtype.itemsize < 4 else np.float64)
    if nodata is not None:
        values[block == nodata] = np.nan
    quads = _quads(values, np.nan)
    total = np.zeros(quads[0].shape, values.dtype)
    count = np.zeros(quads[0].shape, np.float32)
    for quad in quads:
        there = ~np.isnan(quad)
        total += np.where(there, quad, 0)
        count += there
    empty = count == 0
    mean = total / np.maximum(count, 1)
    if kind in "bui":
        mean = np.floor(mean + 0.5)
    blank = nodata if nodata is not None else (np.nan if kind == "f" else 0)
    mean[empty] = blank
    return mean.astype(block.dtype)
