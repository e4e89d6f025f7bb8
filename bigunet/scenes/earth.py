"""The scene that ships with the package: the Earth, with land cover in eight classes."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from bigunet.errors import SceneError, fail

from .classes import ClassTable
from .formats import TiffReader, open_reader
from .labels import as_labels, ignore_id
from .open import lazy
from .pairs import ScenePair
from .readers import Array, MemoryReader, Selection

__all__ = [
    "EARTH_CLASSES",
    "EARTH_CREDIT",
    "EARTH_SHAPE",
    "earth",
    "earth_split",
    "held_out_labels",
    "training_labels",
]

Mask = np.ndarray[Any, np.dtype[np.bool_]]

#: Rows and columns of the cropped scene: 70 N to 60 S, 180 W to 180 E, 1/15 degree a pixel.
EARTH_SHAPE = (1950, 5400)
EARTH_CREDIT = (
    "Image: NASA Earth Observatory, Blue Marble: Next Generation. "
    "Labels: MODIS MCD12C1 v006, doi:10.5067/MODIS/MCD12C1.006."
)
EARTH_CLASSES = ClassTable(
    (
        "water",
        "forest",
        "shrubland",
        "savanna",
        "grassland and wetland",
        "cropland and built-up",
        "snow and ice",
        "barren",
    ),
    # Okabe-Ito's eight, black replaced by grey.
    (
        "#0072b2",
        "#009e73",
        "#cc79a7",
        "#e69f00",
        "#f0e442",
        "#d55e00",
        "#56b4e9",
        "#999999",
    ),
)
#: IGBP class id -> ours: 0 water, 1-5 forests, 6-7 shrublands, 8-9 savannas, 10 grassland,
#: 11 wetland, 12 and 14 cropland, 13 built-up, 15 snow and ice, 16 barren.
_GROUPS = (0, 1, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5, 6, 7)
#: Rows of the full image. Further south the label's last rows hold false water.
_TOP, _BOTTOM = 300, 2250
_BLOCK = (130, 150)
_IMAGE, _LABELS = "bmng.jpg", "MCD12C1.A2019001.006.2020220162300.tif"


def earth(*, chunk: int = 1024) -> ScenePair:
    """The shipped scene: Blue Marble imagery (3, 1950, 5400) uint8 and land cover in 8 classes.

    Coordinates are latitude and longitude of pixel centres, in degrees (EPSG:4326). Image pixel
    (r, c) of the full 2700 x 5400 image takes the label at (int((r + .5) 4/3), int((c + .5) 4/3))
    of the 0.05 degree product; rows 300 to 2250 are kept.

    The labels are a satellite product (MODIS MCD12C1 of 2019, IGBP classes grouped into eight),
    coarser than the image, from another year, and not hand-drawn: a score on them says how well
    that product is reproduced. Credit: `EARTH_CREDIT`; terms: bigunet/data/earth.
    """
    folder = files("bigunet").joinpath("data", "earth")
    image_path, label_path = Path(str(folder / _IMAGE)), Path(str(folder / _LABELS))
    whole = open_reader(image_path)
    whole.crs = "EPSG:4326"
    whole.transform = (1 / 15, 0.0, -180.0, 0.0, -1 / 15, 90.0)
    box = (_TOP, _BOTTOM, 0, EARTH_SHAPE[1])
    image_reader = Selection(whole, box=box)
    ids = MemoryReader(
        _EarthLabels(label_path),
        str(label_path),
        (1, *EARTH_SHAPE),
        np.uint8,
        crs=whole.crs,
        transform=image_reader.transform,
    )
    image = lazy(image_reader, chunk)
    labels = as_labels(ids, EARTH_CLASSES.ignore, EARTH_CLASSES, chunk)
    for scene in (image, labels):
        scene.attrs["credit"] = EARTH_CREDIT
        scene.y.attrs.update(units="degrees_north", standard_name="latitude")
        scene.x.attrs.update(units="degrees_east", standard_name="longitude")
    return ScenePair(image, labels, EARTH_CLASSES)


class _EarthLabels:
    """Reads, aligns and groups the labels; a class because a reader's loader must be pickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self) -> Array:
        product = TiffReader(self._path)
        _, height, width = product.shape
        groups = np.full(256, EARTH_CLASSES.ignore, np.uint8)
        groups[: len(_GROUPS)] = _GROUPS
        rows = ((np.arange(_TOP, _BOTTOM) + 0.5) * 4 / 3).astype(np.intp)
        columns = ((np.arange(EARTH_SHAPE[1]) + 0.5) * 4 / 3).astype(np.intp)
        ids = product.read((0,), 0, height, 0, width)[0]
        return np.asarray(groups[ids[rows][:, columns]][None])


def earth_split(labels: xr.DataArray | None = None) -> Mask:
    """Which pixels are held out, bool (rows, columns): blocks of 130 x 150, one in four.

    Block (i, j) of the whole scene is held out where (i + 2 j) % 4 == 0. Only labels are held
    out: a halo may read imagery across a block's edge.
    labels: a crop of the Earth's labels, whose coordinates tell its place; the whole by default.
    Raises `SceneError` for labels of another grid.
    """
    i = np.arange(EARTH_SHAPE[0]) // _BLOCK[0]
    j = np.arange(EARTH_SHAPE[1]) // _BLOCK[1]
    whole = np.asarray((i[:, None] + 2 * j[None, :]) % 4 == 0)
    if labels is None:
        return whole
    rows = np.rint((90.0 - labels.y.values) * 15 - 0.5).astype(int) - _TOP
    columns = np.rint((180.0 + labels.x.values) * 15 - 0.5).astype(int)
    inside = rows.min() >= 0 and rows.max() < EARTH_SHAPE[0]
    inside = inside and columns.min() >= 0 and columns.max() < EARTH_SHAPE[1]
    steps = np.concatenate([np.diff(rows), np.diff(columns)])
    if not inside or not (steps == 1).all():
        fail(
            SceneError,
            rule="the split is of the Earth scene's labels, or of a crop of them",
            got=f"{labels.shape[0]} x {labels.shape[1]} labels with other coordinates",
            remedy="Crop earth().labels, and keep its coordinates.",
        )
    return whole[np.ix_(rows, columns)]


def training_labels(labels: xr.DataArray) -> xr.DataArray:
    """The labels with every held-out pixel (`earth_split`) set to the ignored id, lazily.

    A crop of the Earth keeps its place: cropping before or after is the same.
    """
    return _keep(labels, ~earth_split(labels))


def held_out_labels(labels: xr.DataArray) -> xr.DataArray:
    """The labels with every pixel that is not held out set to the ignored id, lazily.

    A crop of the Earth keeps its place: cropping before or after is the same.
    """
    return _keep(labels, earth_split(labels))


def _keep(labels: xr.DataArray, mask: Mask) -> xr.DataArray:
    kept = labels.where(xr.DataArray(mask, dims=("y", "x")), labels.dtype.type(ignore_id(labels)))
    return kept.assign_attrs(labels.attrs)
