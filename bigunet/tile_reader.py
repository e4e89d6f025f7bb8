"""Pixels and labels of a tile, read from a scene that may be far larger than memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr

from bigunet.augment import apply, inverse, turn_box, turned_shape
from bigunet.errors import SceneError, fail
from bigunet.geometry import padded_size
from bigunet.scenes import Normalise, check_bands, read_block, read_labels, valid_block
from bigunet.spec import UNetSpec
from bigunet.tiles import Box, Tile

__all__ = ["Sample", "TileReader"]

_Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """A tile of the image as seen through a symmetry (see `bigunet.augment`) and, if any, a
    factor and an offset for each band of the normalised pixels.

    The tile's boxes are in pixels of the turned image.
    """

    tile: Tile
    symmetry: int = 0
    gain: tuple[float, ...] | None = None
    offset: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class TileReader:
    """Reads tiles of one image and its labels, padded as the network pads and turned on request.

    Parameters
    ----------
    image : (band, y, x) scene or array. labels : (y, x) class ids.
    stride : the network's; the image counts as padded to it by its last row and column.
    normalise : applied to the pixels; without it they are only cast to floats.
    ignore : the label of pixels that are not labelled. Pixels that are NaN, infinite or nodata
        count as not labelled and are read as 0 after normalisation, the mean.
    """

    image: xr.DataArray
    labels: xr.DataArray
    stride: int
    normalise: Normalise | None = None
    ignore: int = 255

    @classmethod
    def of(
        cls,
        spec: UNetSpec,
        image: Any,
        labels: Any,
        *,
        normalise: Normalise | None = None,
        ignore: int = 255,
    ) -> TileReader:
        """A reader of scenes or plain arrays (numpy, torch, memory maps), checked against `spec`.

        Raises
        ------
        SceneError : for bands that are not the network's, or sizes that differ.
        """
        scene = _named(image, ("band", "y", "x"))
        truth = _named(labels, ("y", "x"))
        check_bands(scene, spec.in_channels)
        if scene.shape[1:] != truth.shape:
            fail(
                SceneError,
                rule="image and labels have the same number of rows and columns",
                got=f"{scene.shape[1:]} and {truth.shape}",
                remedy="Crop both to the same extent.",
            )
        if truth.dtype.kind not in "iu":
            fail(
                SceneError,
                rule="labels are integers, the ids of classes",
                got=str(truth.dtype),
                remedy="Convert them to class ids, with one id for pixels that are not labelled.",
            )
        return cls(scene, truth, spec.stride, normalise, ignore)

    def cached(self, limit_bytes: int) -> TileReader:
        """The same with image and labels in memory, each where it needs at most `limit_bytes`."""
        image, labels = (
            scene.compute() if scene.nbytes <= limit_bytes else scene
            for scene in (self.image, self.labels)
        )
        return replace(self, image=image, labels=labels)

    @property
    def shape(self) -> tuple[int, int]:
        """(height, width) of the image in pixels."""
        return int(self.labels.shape[0]), int(self.labels.shape[1])

    def pixels(self, sample: Sample) -> _Array:
        """(band, height, width) floats of the tile's read box."""
        box = self._source(sample.tile.read, sample.symmetry)
        inside = box.clip(Box(0, self.shape[0], 0, self.shape[1]))
        block = read_block(self.image, inside.y0, inside.y1, inside.x0, inside.x1)
        if self.normalise is not None:
            values = self.normalise.apply(block)
        else:
            values = block.astype(np.float64 if block.dtype == np.float64 else np.float32)
            values[:, ~self._valid(block)] = 0.0
        below, right = box.y1 - inside.y1, box.x1 - inside.x1
        if below or right:
            values = np.pad(values, ((0, 0), (0, below), (0, right)), mode="edge")
        if sample.gain is not None and sample.offset is not None:
            gain, offset = (np.asarray(v, values.dtype) for v in (sample.gain, sample.offset))
            values = values * gain[:, None, None] + offset[:, None, None]
        return np.ascontiguousarray(apply(values, sample.symmetry))

    def truth(self, sample: Sample) -> _Array:
        """(height, width) int64 labels of the tile's write box."""
        box = self._source(sample.tile.write, sample.symmetry)
        ids = read_labels(self.labels, box.y0, box.y1, box.x0, box.x1).astype(np.int64)
        if self.image.dtype.kind == "f" or self.image.attrs.get("nodata") is not None:
            block = read_block(self.image, box.y0, box.y1, box.x0, box.x1)
            ids[~self._valid(block)] = self.ignore
        return np.ascontiguousarray(apply(ids, sample.symmetry))

    def _valid(self, block: _Array) -> _Array:
        return valid_block(block, self.image.attrs.get("nodata"))

    def _source(self, box: Box, symmetry: int) -> Box:
        padded = padded_size(self.shape[0], self.stride), padded_size(self.shape[1], self.stride)
        return turn_box(box, turned_shape(padded, symmetry), inverse(symmetry))


def _named(array: Any, dims: tuple[str, ...]) -> xr.DataArray:
    if isinstance(array, xr.DataArray):
        return array
    if hasattr(array, "detach"):
        array = array.detach().cpu().numpy()
    if len(array.shape) != len(dims):
        fail(
            SceneError,
            rule=f"an array has the axes {', '.join(dims)}",
            got=f"shape {tuple(array.shape)}",
            remedy="Add or remove axes; one image has no batch axis.",
        )
    return xr.DataArray(array, dims=dims)
