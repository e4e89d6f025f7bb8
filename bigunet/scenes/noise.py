"""Hashed noise: numbers that depend on global position and seed alone.

Everything here uses integer arithmetic and single correctly rounded float operations, so a pixel
comes out the same to the last bit whatever window it is computed in.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Float", "hash32", "texture", "unit", "value_noise"]

Float = np.ndarray[Any, np.dtype[np.float32]]
_GOLDEN = np.uint32(0x9E3779B1)


def hash32(seed: int, *coordinates: Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """32 well mixed bits for each combination of (broadcast) integer coordinates.

    The mixing steps are those of the "lowbias32" integer hash (C. Wellons, hash-prospector, 2018).
    """
    mixed = np.array([seed & 0xFFFFFFFF], np.uint32)
    for coordinate in coordinates:
        mixed = mixed * _GOLDEN + np.asarray(coordinate).astype(np.uint32)
        mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x7FEB352D)
        mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(0x846CA68B)
        mixed = mixed ^ (mixed >> np.uint32(16))
    return mixed


def unit(seed: int, *coordinates: Any) -> Float:
    """`hash32` as float32 in [0, 1)."""
    return (hash32(seed, *coordinates) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def value_noise(y0: int, y1: int, x0: int, x1: int, cell: int, seed: int) -> Float:
    """Smooth noise in [0, 1) over a window: hashed values on a lattice of `cell` pixels.

    Between lattice points the values blend with the weight 3 t^2 - 2 t^3.
    """
    j0, i0 = y0 // cell, x0 // cell
    rows = np.arange(j0, (y1 - 1) // cell + 2)
    columns = np.arange(i0, (x1 - 1) // cell + 2)
    lattice = unit(seed, rows[:, None], columns[None, :])
    x = np.arange(x0, x1)
    at, weight = x // cell - i0, _smooth(x % cell, cell)
    across = np.diff(lattice, axis=1)[:, at] * weight
    across += lattice[:, at]
    step = np.diff(across, axis=0)
    out = np.empty((y1 - y0, x1 - x0), np.float32)
    for j in range(len(rows) - 1):
        top, bottom = max(y0, (j0 + j) * cell), min(y1, (j0 + j + 1) * cell)
        part = out[top - y0 : bottom - y0]
        weight_y = _smooth(np.arange(top, bottom) - (j0 + j) * cell, cell)
        np.multiply(step[j][None, :], weight_y[:, None], out=part)
        part += across[j]
    return out


def _smooth(offset: Any, cell: int) -> Float:
    t = (offset.astype(np.float64) + 0.5) / cell
    return np.asarray((t * t * (3.0 - 2.0 * t)).astype(np.float32))


def texture(size: int, cell: int, margin: tuple[int, int]) -> Float:
    """A periodic grain in [-0.5, 0.5): `size` x `size`, continued by `margin` rows and columns.

    Any window of at most `margin` is then a plain slice, from its origin modulo `size`.
    cell 1 is white noise, a larger one gives blobs of about that many pixels.
    """
    num = size // cell
    lattice = unit(977 + cell, np.arange(num)[:, None], np.arange(num)[None, :])
    t = np.arange(size) % cell / np.float32(cell)
    at = np.arange(size) // cell
    nxt = (at + 1) % num
    t = (t * t * (3 - 2 * t)).astype(np.float32)
    rows = lattice[at] * (1 - t)[:, None] + lattice[nxt] * t[:, None]
    grain = rows[:, at] * (1 - t) + rows[:, nxt] * t - np.float32(0.5)
    return np.pad(grain, ((0, margin[0]), (0, margin[1])), mode="wrap").astype(np.float32)
