"""An image and its labels, checked to belong together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xarray as xr
from rasterio.crs import CRS
from rasterio.errors import CRSError

from ..errors import SceneError, fail
from .classes import ClassTable
from .labels import class_table, ignore_id
from .open import crop, geotransform, read_labels

__all__ = ["ScenePair", "check_bands", "check_classes", "iter_blocks", "pair"]


@dataclass(frozen=True, eq=False)
class ScenePair:
    """An image (band, y, x) and its labels (y, x) on the same grid. Made by `pair`."""

    image: xr.DataArray
    labels: xr.DataArray
    classes: ClassTable | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.labels.shape[0], self.labels.shape[1]

    @property
    def ignore(self) -> int:
        """The label id that is left out of loss and score."""
        return ignore_id(self.labels)

    def with_labels(self, labels: xr.DataArray) -> ScenePair:
        """The same image with other labels of the same shape and classes."""
        return pair(self.image, labels, classes=self.classes, check=False)

    def to_dataset(self) -> xr.Dataset:
        """Both as the variables `image` and `labels` of one dataset."""
        # The labels' own coordinates may differ in the last bits, and must not be joined then.
        labels = self.labels.assign_coords(y=self.image.y, x=self.image.x)
        return xr.Dataset({"image": self.image, "labels": labels})

    def crop(self, y0: int, y1: int, x0: int, x1: int) -> ScenePair:
        """Rows y0:y1 and columns x0:x1 of both; see `crop`."""
        window = (y0, y1, x0, x1)
        return ScenePair(crop(self.image, *window), crop(self.labels, *window), self.classes)


def pair(
    image: xr.DataArray,
    labels: xr.DataArray,
    *,
    classes: ClassTable | None = None,
    check: bool = True,
) -> ScenePair:
    """Check that image and labels belong together, and join them.

    Sizes must be equal; CRS and transform too where both have one. With `check`, the labels are
    read once, block by block, and every id must be a class of the table or the ignored id.
    classes: by default the table that the labels carry; without any, ids from 0 are accepted.
    Raises `SceneError` naming rule, both values and remedy.
    """
    if image.dims != ("band", "y", "x") or labels.dims != ("y", "x"):
        fail(
            SceneError,
            rule="an image has the dims (band, y, x) and labels (y, x)",
            got=f"{image.dims} and {labels.dims}",
            remedy="Open them with open_scene and open_labels",
        )
    if image.shape[1:] != labels.shape:
        fail(
            SceneError,
            rule="image and labels must have the same number of rows and columns",
            got=f"image {image.shape[1]} x {image.shape[2]}, "
            f"labels {labels.shape[0]} x {labels.shape[1]}",
            remedy="Crop both to the same extent, or resample the labels (nearest neighbour)",
        )
    _check_georeference(image, labels)
    table = classes if classes is not None else class_table(labels)
    if table is not None and table.ignore != ignore_id(labels):
        fail(
            SceneError,
            rule="the class table and the labels must ignore the same id",
            got=f"{table.ignore} in the table, {ignore_id(labels)} in the labels",
            remedy="Pass the class table to open_labels",
        )
    if check:
        check_classes(labels, None if table is None else len(table), ignore_id(labels))
    return ScenePair(image, labels, table)


def _check_georeference(image: xr.DataArray, labels: xr.DataArray) -> None:
    one, two = image.attrs.get("crs"), labels.attrs.get("crs")
    remedy = "Reproject the labels to the image's grid, nearest neighbour (rio.reproject_match)"
    if one and two and one != two and not _same_crs(one, two):
        fail(
            SceneError,
            rule="image and labels must have the same CRS",
            got=f"image {one}, labels {two}",
            remedy=remedy,
        )
    if one and two:
        a, b = (np.array(geotransform(s)) for s in (image, labels))
        # A thousandth of a pixel, at the far corner: what rounding in file headers may cause.
        size = np.array([labels.shape[1], labels.shape[0], 1.0])
        shift = np.abs(a - b).reshape(2, 3) @ size
        pixel = np.abs(a.reshape(2, 3)[:, :2]).max()
        if shift.max() > 1e-3 * pixel:
            fail(
                SceneError,
                rule="image and labels must have the same transform",
                got=f"image {tuple(a.tolist())}, labels {tuple(b.tolist())}",
                remedy=remedy,
            )


def _same_crs(one: str, two: str) -> bool:
    try:
        return bool(CRS.from_user_input(one) == CRS.from_user_input(two))
    except CRSError:
        return False


def iter_blocks(shape: tuple[int, ...], block: int = 2048) -> Iterator[tuple[int, int, int, int]]:
    """Windows (y0, y1, x0, x1) that cover (rows, columns) once, in reading order."""
    height, width = shape[-2:]
    for y in range(0, height, block):
        for x in range(0, width, block):
            yield y, min(y + block, height), x, min(x + block, width)


def check_classes(labels: xr.DataArray, num_classes: int | None, ignore: int = 255) -> None:
    """Every label must be 0 .. num_classes - 1 or `ignore`; reads block by block.

    The first offending value (in reading order of blocks) and its position are in the error.
    """
    top = np.iinfo(np.int64).max if num_classes is None else num_classes - 1
    for y0, y1, x0, x1 in iter_blocks(labels.shape):
        ids = read_labels(labels, y0, y1, x0, x1)
        wrong = ((ids < 0) | (ids > top)) & (ids != ignore)
        if wrong.any():
            row, column = (int(i) for i in np.argwhere(wrong)[0])
            upper = "" if num_classes is None else f" to {top}"
            fail(
                SceneError,
                rule=f"every label must be a class id (0{upper}) or the ignored id {ignore}",
                got=f"{ids[row, column]} at row {y0 + row}, column {x0 + column} "
                f"of {labels.attrs.get('source', 'the labels')}",
                remedy="Add the class to the table, or write the ignored id there",
            )


def check_bands(scene: xr.DataArray, in_channels: int) -> None:
    """The scene must have as many bands as the network has input channels."""
    num_bands = scene.sizes["band"]
    if num_bands != in_channels:
        if num_bands > in_channels:
            remedy = f"Choose bands: open_scene(path, bands={list(range(in_channels))})"
        else:
            some = [0] * in_channels
            remedy = f"Repeat bands: open_scene(path, bands={some})"
        fail(
            SceneError,
            rule=f"a network with {in_channels} input channels needs as many bands",
            got=f"{num_bands} bands in {scene.attrs.get('source', 'the scene')}",
            remedy=f"{remedy}, or use a network with in_channels={num_bands}",
        )
