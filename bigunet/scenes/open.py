"""Open imagery as a lazy xarray, and read windows of it.

A scene is an `xarray.DataArray` with dims (band, y, x), backed by dask, that reads nothing until
asked. `read_block` goes straight to the file, past dask, wherever the array is still as opened.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

from ..errors import SceneError, fail
from .formats import open_reader
from .readers import Array, Reader, Selection

__all__ = [
    "crop",
    "geotransform",
    "lazy",
    "open_scene",
    "read_block",
    "read_labels",
    "valid_block",
    "valid_mask",
]

#: dask array name -> its reader: the short way for `read_block`. Weak: the graph owns the reader.
_READERS: weakref.WeakValueDictionary[str, Reader] = weakref.WeakValueDictionary()


def open_scene(
    path: str | Path,
    *,
    chunk: int = 1024,
    bands: Sequence[int] | None = None,
    nodata: float | None = None,
    layout: str | None = None,
) -> xr.DataArray:
    """Imagery as a lazy (band, y, x) array; the dtype on disk is kept, nothing is scaled.

    path: GeoTIFF (.tif), PNG, JPEG, Zarr (array or group, formats 2 and 3) or .npy. GeoTIFF, Zarr
    and .npy are read window by window; PNG and JPEG have no windows and are decoded whole, once,
    on first use: convert a large one to GeoTIFF or Zarr.
    chunk: rows and columns of a dask chunk. bands: 0-based bands to keep, in this order.
    nodata: overrides the file's value. layout: "HW", "HWB" or "BHW" for arrays without named axes;
    by default the one axis (first or last) of at most 16 entries is the bands.

    Coordinates y and x are pixel centres: in the CRS' units, or pixels (0.5, 1.5, ...) without a
    georeference. Attrs: `transform` (a, b, c, d, e, f: x = a col + b row + c, y = d col + e row +
    f, at pixel corners), `crs` ("EPSG:n" or WKT; absent if unknown), `nodata` (absent if none),
    `source`, `dtype`, `ignored` (which pixels `valid_mask` leaves out, in words).

    Raises `SceneError` for a missing, truncated or unreadable file, an unknown suffix, an unclear
    axis order, and bands that are not there; and later, for a window that turns out unreadable.
    """
    reader = open_reader(path, layout)
    if bands is not None:
        wrong = [b for b in bands if not 0 <= b < reader.shape[0]]
        if wrong or not len(bands):
            fail(
                SceneError,
                rule=f"bands must be among the file's bands 0 to {reader.shape[0] - 1}",
                got=f"bands={list(bands)} for {path}",
                remedy="Count bands from 0, and name at least one",
            )
        reader = Selection(reader, bands)
    if nodata is not None:
        reader.nodata = float(nodata)
    return lazy(reader, chunk)


def lazy(reader: Reader, chunk: int = 1024, *, labels: bool = False) -> xr.DataArray:
    """A reader as a lazy array: (band, y, x), or (y, x) for labels (band 0)."""
    if chunk < 1:
        fail(SceneError, rule="chunk must be at least 1 pixel", got=chunk, remedy="Try 1024")
    num_bands, height, width = reader.shape
    data = da.from_array(
        reader,
        chunks=(num_bands, min(chunk, height), min(chunk, width)),
        name=f"scene-{uuid.uuid4().hex}",
        meta=np.empty((0, 0, 0), reader.dtype),
        asarray=False,
        lock=False,
    )
    a, b, c, d, e, f = reader.transform or (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    rows, columns = np.arange(height) + 0.5, np.arange(width) + 0.5
    if b or d:  # a rotated grid has no 1-d coordinates: count pixels, and keep the transform
        y, x = rows, columns
    else:
        y, x = f + e * rows, c + a * columns
    attrs: dict[str, Any] = {"transform": (a, b, c, d, e, f), "source": reader.path}
    attrs["dtype"] = str(reader.dtype)
    if reader.crs:
        attrs["crs"] = reader.crs
    coords: dict[str, Any] = {"y": y, "x": x}
    if labels:
        data = data[0]
        dims: tuple[str, ...] = ("y", "x")
    else:
        dims = ("band", "y", "x")
        coords["band"] = np.arange(num_bands)
        attrs["ignored"] = _ignored_words(reader.dtype, reader.nodata)
        if reader.nodata is not None:
            attrs["nodata"] = float(reader.nodata)
    _READERS[data.name] = reader
    return xr.DataArray(data, dims=dims, coords=coords, attrs=attrs)


def read_block(scene: xr.DataArray, y0: int, y1: int, x0: int, x1: int) -> Array:
    """The pixels of rows y0:y1 and columns x0:x1, all bands: (band, y1 - y0, x1 - x0).

    Reads that window only, from any thread. Works on any (band, y, x) array; one that is as
    `open_scene`, `earth` or `synthetic` gave it is read without dask. Raises `SceneError` for a
    window outside the scene, and for one that cannot be read, naming window and file.
    """
    return _window(scene, 3, y0, y1, x0, x1)


def read_labels(labels: xr.DataArray, y0: int, y1: int, x0: int, x1: int) -> Array:
    """`read_block` for a (y, x) array of labels: (y1 - y0, x1 - x0)."""
    return _window(labels, 2, y0, y1, x0, x1)


def crop(scene: xr.DataArray, y0: int, y1: int, x0: int, x1: int) -> xr.DataArray:
    """Rows y0:y1 and columns x0:x1 of imagery or labels, lazily, as a scene of its own.

    Unlike a plain slice its attrs' `transform` is that of the part, and it is read without dask
    where the whole is. Raises `SceneError` for a window outside the scene.
    """
    _check_window(scene, y0, y1, x0, x1)
    part = scene.isel(y=slice(y0, y1), x=slice(x0, x1))
    reader = _READERS.get(getattr(scene.data, "name", ""))
    if reader is not None:
        chunk = max(part.data.chunksize[-2:])
        whole = lazy(Selection(reader, box=(y0, y1, x0, x1)), chunk, labels=scene.ndim == 2)
        coords = {k: part.coords[k] for k in part.coords}
        part = xr.DataArray(whole.data, dims=part.dims, coords=coords, attrs=part.attrs)
    return part.assign_attrs(transform=geotransform(part))


def geotransform(scene: xr.DataArray) -> tuple[float, float, float, float, float, float]:
    """The affine transform (a, b, c, d, e, f) of a scene, also after slicing it with xarray.

    Slicing keeps attrs, so `attrs["transform"]` is then that of the whole; the coordinates tell.
    A rotated scene has no such coordinates: its attrs are believed.
    """
    a, b, c, d, e, f = (float(v) for v in scene.attrs.get("transform", (1, 0, 0, 0, 1, 0)))
    if b or d or "y" not in scene.coords or "x" not in scene.coords:
        return a, b, c, d, e, f
    c, a = _origin_and_step(scene.x.values, c, a)
    f, e = _origin_and_step(scene.y.values, f, e)
    return a, b, c, d, e, f


def _origin_and_step(centres: Array, origin: float, step: float) -> tuple[float, float]:
    num = len(centres)
    seen = float(centres[-1] - centres[0]) / (num - 1) if num > 1 else step
    start = float(centres[0]) - seen / 2
    # Within rounding of the coordinates the stated numbers are the better ones.
    same = abs(start - origin) < 1e-6 * abs(step) and abs(seen - step) * num < 1e-6 * abs(step)
    return (origin, step) if same else (start, seen)


def _window(scene: xr.DataArray, ndim: int, y0: int, y1: int, x0: int, x1: int) -> Array:
    if scene.ndim != ndim or scene.dims[-2:] != ("y", "x"):
        dims = "(band, y, x)" if ndim == 3 else "(y, x)"
        fail(
            SceneError,
            rule=f"the array must have the dims {dims}",
            got=f"{scene.dims}",
            remedy="read_block takes imagery, read_labels takes labels; transpose others first",
        )
    _check_window(scene, y0, y1, x0, x1)
    reader = _READERS.get(getattr(scene.data, "name", ""))
    if reader is not None:
        block = reader.read(range(reader.shape[0] if ndim == 3 else 1), y0, y1, x0, x1)
        return block if ndim == 3 else block[0]
    part = scene.isel(y=slice(y0, y1), x=slice(x0, x1)).data
    if isinstance(part, da.Array):
        part = part.compute(scheduler="synchronous")
    return np.ascontiguousarray(part)


def _check_window(scene: xr.DataArray, y0: int, y1: int, x0: int, x1: int) -> None:
    height, width = scene.shape[-2:]
    if not (0 <= y0 < y1 <= height and 0 <= x0 < x1 <= width):
        fail(
            SceneError,
            rule=f"a window must lie inside the scene of {height} x {width} pixels",
            got=f"rows {y0}:{y1}, columns {x0}:{x1}",
            remedy="Clip the window to the scene",
        )


def valid_block(block_BHW: Array, nodata: float | None = None) -> Array:
    """Which pixels count, bool (height, width).

    Left out are pixels with NaN or infinity in any band, and nodata pixels: for unsigned dtypes
    those with the nodata value in every band (0 in one band of a colour is a colour, not a gap),
    for signed and floating ones those with it in any band.
    """
    kind = block_BHW.dtype.kind
    valid = np.ones(block_BHW.shape[1:], bool)
    if kind == "f":
        valid &= np.isfinite(block_BHW).all(axis=0)
    if nodata is not None and not np.isnan(nodata):
        gaps = block_BHW == nodata
        valid &= ~(gaps.all(axis=0) if kind in "bu" else gaps.any(axis=0))
    return valid


def valid_mask(scene: xr.DataArray) -> xr.DataArray:
    """`valid_block` of a whole scene, lazily: bool (y, x), True where the pixel counts."""
    nodata = scene.attrs.get("nodata")
    data = scene.transpose("band", "y", "x").data
    if isinstance(data, da.Array):
        mask = data.rechunk({0: -1}).map_blocks(
            valid_block, nodata, drop_axis=0, dtype=bool, meta=np.empty((0, 0), bool)
        )
    else:
        mask = valid_block(data, nodata)
    coords = {k: scene.coords[k] for k in ("y", "x") if k in scene.coords}
    return xr.DataArray(mask, dims=("y", "x"), coords=coords, name="valid")


def _ignored_words(dtype: np.dtype[Any], nodata: float | None) -> str:
    parts = ["NaN or infinite in any band"] if dtype.kind == "f" else []
    if nodata is not None and not np.isnan(nodata):
        where = "every band" if dtype.kind in "bu" else "any band"
        parts.append(f"equal to nodata ({nodata:g}) in {where}")
    return "pixels " + " or ".join(parts) if parts else "none"
