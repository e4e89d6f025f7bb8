"""Open labels as lazy (y, x) class ids, whether stored as ids or as colours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from ..errors import SceneError, fail
from .classes import ClassTable, find_class_file, rgb_of
from .formats import open_reader
from .open import lazy
from .readers import Array, Reader

__all__ = ["ColourLabels", "IdLabels", "as_labels", "class_table", "ignore_id", "open_labels"]


def open_labels(
    path: str | Path,
    *,
    classes: ClassTable | None = None,
    ignore: int = 255,
    chunk: int = 1024,
    layout: str | None = None,
) -> xr.DataArray:
    """Labels as lazy integer class ids, dims (y, x), coordinates and attrs as `open_scene`.

    Reads the same formats. One band of integers holds ids (of a palette PNG its indices); three
    bands, or four with alpha, of uint8 hold colours, turned into ids by the class table.
    classes: the table; by default the one stored with the labels: in a Zarr's attrs, or beside the
    file (`find_class_file`). ignore: the id to leave out, where there is no table; a table states
    its own. The file's nodata value becomes the ignored id.

    Attrs: `classes` (a `ClassTable.to_dict()`; absent where there is no table) and `ignore`.
    Raises `SceneError`: as `open_scene`; labels that are not integers; colours without a table;
    a colour outside the table (when that block is read). Ids are checked by `pair`.
    """
    path = Path(path)
    inner = open_reader(path, layout, labels=True)
    if classes is None and isinstance(inner.meta.get("classes"), dict):
        classes = ClassTable.from_dict(inner.meta["classes"])
    if classes is None and (beside := find_class_file(path)) is not None:
        classes = ClassTable.from_file(beside)
    if classes is None:
        ignore = int(inner.meta.get("ignore", ignore))
    elif ignore not in (255, classes.ignore):
        fail(
            SceneError,
            rule=f"the class table ignores id {classes.ignore}, so must the labels",
            got=f"ignore={ignore}",
            remedy="Leave ignore out, or change it in the class table",
        )
    else:
        ignore = classes.ignore
    reader: Reader
    if inner.shape[0] == 1:
        reader = IdLabels(inner, ignore)
    elif inner.shape[0] in (3, 4) and inner.dtype == np.uint8:
        if classes is None:
            fail(
                SceneError,
                rule="labels stored as colours need a class table",
                got=f"{inner.shape[0]} bands in {path}",
                remedy=f"Pass classes=ClassTable(...), or write {path.stem}.classes.yaml beside it",
            )
        reader = ColourLabels(inner, classes)
    else:
        fail(
            SceneError,
            rule="labels have one band of ids, or three or four uint8 bands of colour",
            got=f"{inner.shape[0]} bands of {inner.dtype} in {path}",
            remedy="Is this the image? Otherwise write the labels as one band of integers",
        )
    return as_labels(reader, ignore, classes, chunk)


def as_labels(
    reader: Reader, ignore: int, classes: ClassTable | None, chunk: int = 1024
) -> xr.DataArray:
    """A reader of ids as lazy labels with their attrs."""
    labels = lazy(reader, chunk, labels=True)
    labels.attrs["ignore"] = ignore
    if classes is not None:
        labels.attrs["classes"] = classes.to_dict()
    return labels


def class_table(labels: xr.DataArray) -> ClassTable | None:
    """The class table that labels carry, or None."""
    data = labels.attrs.get("classes")
    return None if data is None else ClassTable.from_dict(data)


def ignore_id(labels: xr.DataArray) -> int:
    """The id of labels that is left out of loss and score; 255 where the labels do not say."""
    return int(labels.attrs.get("ignore", 255))


def _like(inner: Reader, dtype: Any) -> dict[str, Any]:
    shape = (1, inner.shape[1], inner.shape[2])
    place = {"crs": inner.crs, "transform": inner.transform}
    return {"path": inner.path, "shape": shape, "dtype": dtype, **place}


class IdLabels(Reader):
    """Ids as stored; the file's nodata becomes the ignored id; a dtype that can hold that id."""

    def __init__(self, inner: Reader, ignore: int) -> None:
        if inner.dtype.kind not in "bui":
            fail(
                SceneError,
                rule="labels must be integers",
                got=f"{inner.dtype} in {inner.path}",
                remedy="Convert the labels to uint8, with the ignored id in place of NaN",
            )
        dtype = np.dtype("uint8") if inner.dtype.kind == "b" else inner.dtype
        if not np.can_cast(np.min_scalar_type(ignore), dtype, "safe"):
            dtype = np.promote_types(dtype, np.min_scalar_type(ignore))
        super().__init__(**_like(inner, dtype))
        self._inner, self._ignore = inner, ignore

    def _read(self, bands: Sequence[int], y0: int, y1: int, x0: int, x1: int) -> Array:
        ids = self._inner.read((0,), y0, y1, x0, x1).astype(self.dtype, copy=False)
        nodata = self._inner.nodata
        if nodata is not None and nodata != self._ignore:
            ids[ids == nodata] = self._ignore
        return ids


class ColourLabels(Reader):
    """Colours to ids by the class table; `threshold` first makes each band 0 or 255."""

    def __init__(self, inner: Reader, classes: ClassTable, threshold: int | None = None) -> None:
        super().__init__(**_like(inner, np.min_scalar_type(max(classes.ignore, len(classes)))))
        if classes.ignore < 0:
            self.dtype = np.dtype("int16")
        self._inner, self._threshold = inner, threshold
        codes = _codes(rgb_of((*classes.colours, *classes.ignore_colours)).T)
        ignored = [classes.ignore] * len(classes.ignore_colours)
        ids = np.array([*range(len(classes)), *ignored], self.dtype)
        order = np.argsort(codes)
        self._codes, self._ids = codes[order], ids[order]

    def _read(self, bands: Sequence[int], y0: int, y1: int, x0: int, x1: int) -> Array:
        rgb = self._inner.read((0, 1, 2), y0, y1, x0, x1)
        if self._threshold is not None:
            rgb = np.where(rgb >= self._threshold, np.uint8(255), np.uint8(0))
        codes = _codes(rgb)
        at = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        wrong = self._codes[at] != codes
        if wrong.any():
            row, column = (int(i) for i in np.argwhere(wrong)[0])
            fail(
                SceneError,
                rule="every colour of a label mask must be in the class table",
                got=f"#{codes[row, column]:06x} at row {y0 + row}, column {x0 + column} "
                f"of {self.path}",
                remedy="Add the colour to the table (or to ignore_colours), or save the mask "
                "without smoothing and lossy compression",
            )
        return np.asarray(self._ids[at][None])


def _codes(rgb: Array) -> Array:
    r, g, b = rgb.astype(np.uint32)
    return np.asarray((r << np.uint32(16)) | (g << np.uint32(8)) | b)
