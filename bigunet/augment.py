"""The eight symmetries of the square grid: mirrored or not, and 0 to 3 quarter turns.

A symmetry is a number from 0 (identity) to 7: `s >= 4` mirrors left and right first, then
`s % 4` quarter turns follow, counter-clockwise. It is applied to the whole image as padded to the
stride, whose sides are multiples of the stride, so the pooling lattice stays in place and every
tile of the turned image is exact: its read box is the turned read box, clipped at the true border.
No second rule for borders is needed, and no pixel is lost.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bigunet.geometry import padded_size
from bigunet.spec import UNetSpec
from bigunet.tiles import Box, Tile, place_tile

__all__ = ["SYMMETRIES", "apply", "inverse", "turn_box", "turned_shape", "turned_tile"]

SYMMETRIES = range(8)


def apply(array: np.ndarray[Any, Any], symmetry: int) -> np.ndarray[Any, Any]:
    """`array` (..., height, width) mirrored and turned; a view where numpy can."""
    if symmetry >= 4:
        array = array[..., ::-1]
    return np.rot90(array, symmetry % 4, axes=(-2, -1))


def inverse(symmetry: int) -> int:
    """The symmetry that undoes `symmetry`: a mirrored one is its own inverse."""
    return symmetry if symmetry >= 4 else -symmetry % 4


def turned_shape(shape: tuple[int, int], symmetry: int) -> tuple[int, int]:
    """(height, width) after the symmetry."""
    return (shape[1], shape[0]) if symmetry % 2 else shape


def turn_box(box: Box, shape: tuple[int, int], symmetry: int) -> Box:
    """Where `box`, of an image of `shape`, lies after the symmetry."""
    height, width = shape
    if symmetry >= 4:
        box = Box(box.y0, box.y1, width - box.x1, width - box.x0)
    for _ in range(symmetry % 4):
        box = Box(width - box.x1, width - box.x0, box.y0, box.y1)
        height, width = width, height
    return box


def turned_tile(
    core: Box, shape: tuple[int, int], spec: UNetSpec, symmetry: int, *, halo: int | None = None
) -> Tile:
    """The tile that answers for `core` (a box of the unturned image) in the turned image.

    All boxes of the tile are in pixels of the turned image, padded to the stride.
    """
    stride = spec.stride
    padded = padded_size(shape[0], stride), padded_size(shape[1], stride)
    return place_tile(
        turn_box(core, padded, symmetry),
        Box(0, turned_shape(padded, symmetry)[0], 0, turned_shape(padded, symmetry)[1]),
        turn_box(Box(0, shape[0], 0, shape[1]), padded, symmetry),
        spec,
        halo=halo,
    )
