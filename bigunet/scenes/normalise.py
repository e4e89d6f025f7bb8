"""Scale imagery of any dtype to what a network expects: per-band mean 0, deviation 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from ..errors import SceneError, fail
from .open import read_block, valid_block
from .pairs import iter_blocks
from .readers import Array

__all__ = ["Normalise", "normalisation"]


@dataclass(frozen=True)
class Normalise:
    """(value - mean) / std for each band, in float32; pixels that do not count become 0.

    `nodata` is the scene's nodata value, if any: see `valid_block` for what is left out.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    nodata: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", tuple(float(v) for v in self.mean))
        object.__setattr__(self, "std", tuple(float(v) for v in self.std))
        ok = np.isfinite([*self.mean, *self.std]).all() and min(self.std, default=0) > 0
        if len(self.mean) != len(self.std) or not ok:
            fail(
                SceneError,
                rule="a normalisation needs a finite mean and a positive std for each band",
                got=f"mean {self.mean}, std {self.std}",
                remedy="Take them from normalisation(scene)",
            )

    def apply(self, block_BHW: Array) -> np.ndarray[Any, np.dtype[np.float32]]:
        """float32 of the block's shape. Raises `SceneError` where the bands differ in number."""
        if block_BHW.shape[0] != len(self.mean):
            fail(
                SceneError,
                rule=f"this normalisation is for {len(self.mean)} bands",
                got=f"{block_BHW.shape[0]} bands",
                remedy=f"Choose bands: open_scene(path, bands={list(range(len(self.mean)))})",
            )
        out = block_BHW.astype(np.float32)
        out -= np.asarray(self.mean, np.float32)[:, None, None]
        # A product with the reciprocal: one rounding more than a division, and faster.
        out *= (1.0 / np.asarray(self.std)).astype(np.float32)[:, None, None]
        if block_BHW.dtype.kind == "f" or self.nodata is not None:
            out[:, ~valid_block(block_BHW, self.nodata)] = 0.0
        return out

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, fit for JSON and YAML."""
        return {"mean": list(self.mean), "std": list(self.std), "nodata": self.nodata}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Normalise:
        """The inverse of `to_dict`."""
        return cls(tuple(data["mean"]), tuple(data["std"]), data.get("nodata"))


def normalisation(scene: xr.DataArray, *, max_blocks: int = 64, block: int = 512) -> Normalise:
    """Mean and standard deviation of each band over at most `max_blocks` blocks.

    The blocks are spread evenly over the scene by a fixed rule, so the result is the same each
    time; with enough of them it is the whole scene's. Pixels that `valid_mask` leaves out do not
    count. Sums are float64, by Chan, Golub and LeVeque's pairwise update (1983). A constant band
    gets std 1. Raises `SceneError` where no sampled pixel counts.
    """
    blocks = list(iter_blocks(scene.shape, block))
    if len(blocks) > max_blocks:
        # Steps of the golden ratio's fraction spread over rows and columns alike, without repeats.
        step = (np.arange(max_blocks) * 0.6180339887498949) % 1.0
        blocks = [blocks[i] for i in sorted({int(s * len(blocks)) for s in step})]
    nodata = scene.attrs.get("nodata")
    count, mean, square = 0, np.zeros(scene.sizes["band"]), np.zeros(scene.sizes["band"])
    for window in blocks:
        pixels = read_block(scene, *window)
        values = pixels[:, valid_block(pixels, nodata)].astype(np.float64)
        num = values.shape[1]
        if not num:
            continue
        here = values.mean(axis=1)
        delta, total = here - mean, count + num
        square += ((values - here[:, None]) ** 2).sum(axis=1) + delta**2 * (count * num / total)
        mean += delta * (num / total)
        count = total
    if not count:
        fail(
            SceneError,
            rule="a scene must have pixels that are neither nodata, NaN nor infinite",
            got=f"none in {len(blocks)} sampled blocks of {scene.attrs.get('source', 'the scene')}",
            remedy="Check nodata=, or sample more with max_blocks=",
        )
    std = np.sqrt(square / count)
    std[std == 0] = 1.0
    return Normalise(tuple(mean.tolist()), tuple(std.tolist()), nodata)
