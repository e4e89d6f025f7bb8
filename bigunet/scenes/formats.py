"""Readers of image files: GeoTIFF through rioxarray, PNG and JPEG through Pillow, Zarr."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import rasterio
import rioxarray
import zarr
from PIL import Image
from rasterio.crs import CRS

from ..errors import SceneError, fail
from .readers import Array, MemoryReader, NpyReader, Reader, Transform, layout_of

__all__ = ["SUFFIXES", "TiffReader", "ZarrReader", "open_reader"]

GDAL_CACHE_BYTES = 64 << 20
_PIL_LOCK = threading.Lock()  # guards Pillow's process-wide size limit while it is lifted


def open_reader(path: str | Path, layout: str | None = None, *, labels: bool = False) -> Reader:
    """The reader for `path`, by its suffix.

    `labels=True` keeps a palette PNG's indices, and prefers a Zarr group's array "labels".
    """
    path = Path(path)
    suffix = path.suffix.lower()
    # A group or array inside a Zarr store has no suffix of its own: "scene.zarr/image".
    if suffix not in SUFFIXES and any(p.suffix == ".zarr" for p in path.parents):
        suffix = ".zarr"
    if suffix not in SUFFIXES:
        fail(
            SceneError,
            rule=f"a scene's file name ends in one of {', '.join(SUFFIXES)}",
            got=str(path),
            remedy="Convert the file, or rename it to the suffix of its format",
        )
    if not path.exists():
        fail(
            SceneError,
            rule="the scene must exist",
            got=str(path),
            remedy=f"Check the path; the working directory is {Path.cwd().name!r}",
        )
    if suffix == ".npy":
        return NpyReader(path, layout)
    if suffix == ".zarr":
        return ZarrReader(path, layout, "labels" if labels else "image")
    if suffix in (".tif", ".tiff"):
        return TiffReader(path)
    return _pillow_reader(path, palette=labels)


SUFFIXES = (".tif", ".tiff", ".png", ".jpg", ".jpeg", ".zarr", ".npy")


def _damaged(path: Path, what: str) -> NoReturn:
    fail(
        SceneError,
        rule="the file must be complete and readable",
        got=f"{path}: {what}",
        remedy="The file is damaged, truncated or of another format: fetch or write it again",
    )


class TiffReader(Reader):
    """A GeoTIFF: windows through rioxarray, which locks the file handle between threads."""

    def __init__(self, path: Path) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
                with rasterio.open(path) as data:
                    _check_blocks(data, path)
                    georeferenced = not data.transform.is_identity
                    transform = tuple(float(v) for v in data.transform)[:6]
                    nodata, crs = data.nodata, data.crs
                opened: Any = rioxarray.open_rasterio(path, cache=False, parse_coordinates=False)
        except rasterio.errors.RasterioError as error:
            _damaged(path, str(error))
        if not hasattr(opened, "dtype"):
            _damaged(path, "it holds several rasters of different shapes")
        self._opened = opened
        super().__init__(
            str(path),
            opened.shape,
            opened.dtype,
            crs=_crs_text(crs),
            transform=transform if georeferenced else None,  # type: ignore[arg-type]
            nodata=nodata,
        )

    def _read(self, bands: Sequence[int], y0: int, y1: int, x0: int, x1: int) -> Array:
        # Otherwise GDAL keeps decoded blocks in 5 % of all memory: on a big machine, a scene.
        with rasterio.Env(GDAL_CACHEMAX=GDAL_CACHE_BYTES):
            return np.asarray(self._opened[list(bands), y0:y1, x0:x1].values)


def _check_blocks(data: Any, path: Path) -> None:
    """The file must reach to the end of every block that its directory lists."""
    size = path.stat().st_size
    shared = data.interleaving is not None and data.interleaving.name == "pixel"
    height, width = data.block_shapes[0]
    for band in range(1, 2 if shared else data.count + 1):
        for y in range(-(-data.height // height)):
            for x in range(-(-data.width // width)):
                offset = data.get_tag_item(f"BLOCK_OFFSET_{x}_{y}", "TIFF", bidx=band)
                if offset is None:  # a sparse block, which reads as nodata or zero
                    continue
                length = data.get_tag_item(f"BLOCK_SIZE_{x}_{y}", "TIFF", bidx=band)
                if int(offset) + int(length or 0) > size:
                    _damaged(path, f"block ({y}, {x}) of band {band} lies beyond the file's end")


def _crs_text(crs: CRS | None) -> str | None:
    if not crs:
        return None
    code = crs.to_epsg(confidence_threshold=100)
    return f"EPSG:{code}" if code else str(crs.to_wkt())


def _open_image(path: Path) -> Image.Image:
    """Open without Pillow's limit of 179 million pixels: scenes are large on purpose."""
    with _PIL_LOCK:
        limit = Image.MAX_IMAGE_PIXELS
        Image.MAX_IMAGE_PIXELS = None
        try:
            return Image.open(path)
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _decode_image(path: Path, mode: str) -> Array:
    with _open_image(path) as image:
        pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    if pixels.dtype == bool:
        pixels = pixels.astype(np.uint8)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _decode_gdal(path: Path) -> Array:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        with rasterio.open(path) as data:
            return np.asarray(data.read())


#: Pillow's mode: (the mode to decode to, bands, dtype). 16-bit colour PNG goes through GDAL.
_MODES: dict[str, tuple[str, int, str]] = {
    "1": ("1", 1, "uint8"),
    "L": ("L", 1, "uint8"),
    "LA": ("LA", 2, "uint8"),
    "P": ("RGB", 3, "uint8"),
    "RGB": ("RGB", 3, "uint8"),
    "RGBA": ("RGBA", 4, "uint8"),
    "CMYK": ("RGB", 3, "uint8"),
    "YCbCr": ("RGB", 3, "uint8"),
    "I;16": ("I;16", 1, "uint16"),
    "I;16B": ("I;16", 1, "uint16"),
    "I": ("I", 1, "int32"),
    "F": ("F", 1, "float32"),
}


def _pillow_reader(path: Path, palette: bool) -> Reader:
    """PNG or JPEG: the size is read now, the pixels (the whole image) on first use."""
    try:
        with _open_image(path) as image:
            mode, (width, height), kind = image.mode, image.size, image.format
    except (OSError, SyntaxError, ValueError) as error:
        _damaged(path, str(error))
    with path.open("rb") as file:
        head = file.read(26)
        file.seek(max(0, path.stat().st_size - 4096))
        tail = file.read()
    if kind == "PNG" and b"IEND\xaeB`\x82" not in tail:
        _damaged(path, "the PNG has no end marker (IEND)")
    if kind == "JPEG" and b"\xff\xd9" not in tail:
        _damaged(path, "the JPEG has no end marker (EOI)")
    load: Callable[[], Array]
    if kind == "PNG" and head[24] == 16 and head[25] in (2, 4, 6):
        bands, dtype = {2: 3, 4: 2, 6: 4}[head[25]], "uint16"
        load = partial(_decode_gdal, path)
    else:
        if mode not in _MODES:
            _damaged(path, f"pixel mode {mode!r} is not supported")
        decode, bands, dtype = _MODES[mode]
        if mode == "P" and palette:
            decode, bands = "P", 1
        load = partial(_decode_image, path, decode)
    return MemoryReader(load, str(path), (bands, height, width), dtype)


class ZarrReader(Reader):
    """A Zarr array or group, formats 2 and 3.

    Of a group the array named `prefer` is taken, or the only array of two or three dimensions;
    name another one in the path ("scene.zarr/labels"). Axes come from the dimension names where
    they have y and x, otherwise from the shape as for .npy. A chunk that is not there reads as
    the fill value, as the Zarr specification has it.
    """

    def __init__(self, path: Path, layout: str | None, prefer: str = "image") -> None:
        try:
            node = zarr.open(str(path), mode="r")
            group = node if isinstance(node, zarr.Group) else None
            array = _choose(node, path, prefer) if isinstance(node, zarr.Group) else node
        except SceneError:
            raise
        except Exception as error:  # zarr raises many kinds for a damaged store
            _damaged(path, f"{type(error).__name__}: {error}")
        self._array = array
        attrs = dict(array.attrs)
        names = getattr(array.metadata, "dimension_names", None) or attrs.get("_ARRAY_DIMENSIONS")
        if layout is None and names and {"y", "x"} <= set(names) and len(names) in (2, 3):
            band = [i for i, n in enumerate(names) if n not in ("y", "x")]
            self._axes = (band[0] if band else -1, names.index("y"), names.index("x"))
        else:
            self._axes = layout_of(array.shape, layout, str(path))
        if attrs.get("complete") is False:
            _damaged(path, "its writing was interrupted")
        shape = tuple(array.shape[i] if i >= 0 else 1 for i in self._axes)
        crs, transform = _zarr_georeference(attrs, group)
        super().__init__(
            str(path),
            (shape[0], shape[1], shape[2]),
            array.dtype,
            crs=crs,
            transform=transform,
            nodata=attrs.get("nodata", attrs.get("_FillValue")),
        )
        self.meta = attrs
        self.read(range(1), shape[1] - 1, shape[1], shape[2] - 1, shape[2])  # the last chunk

    def _read(self, bands: Sequence[int], y0: int, y1: int, x0: int, x1: int) -> Array:
        first = min(bands)
        spans = (slice(first, max(bands) + 1), slice(y0, y1), slice(x0, x1))
        where = {axis: spans[i] for i, axis in enumerate(self._axes) if axis >= 0}
        block = np.asarray(self._array[tuple(where[a] for a in range(len(where)))])
        if self._axes[0] < 0:
            return block[None]
        return block.transpose(self._axes)[[b - first for b in bands]]


def _choose(group: Any, path: Path, prefer: str) -> Any:
    arrays = dict(group.arrays())
    images = {n: a for n, a in arrays.items() if a.ndim in (2, 3) and n not in ("y", "x", "band")}
    if prefer in images:
        return images[prefer]
    if len(images) != 1:
        fail(
            SceneError,
            rule=f"a Zarr group must have an array named {prefer!r}, or one image array only",
            got=f"{path} with {sorted(images) or 'no image arrays'}",
            remedy=f"Name the array in the path, as in {path.name}/{min(images, default='a')}",
        )
    return next(iter(images.values()))


def _zarr_georeference(attrs: dict[str, Any], group: Any) -> tuple[str | None, Transform | None]:
    """Our own attrs, or the CF grid mapping 'spatial_ref' that rioxarray writes."""
    crs, transform = attrs.get("crs"), attrs.get("transform")
    if group is not None and crs is None and "spatial_ref" in group:
        mapping = dict(group["spatial_ref"].attrs)
        wkt = mapping.get("crs_wkt") or mapping.get("spatial_ref")
        crs = _crs_text(CRS.from_wkt(wkt)) if wkt else None
        if "GeoTransform" in mapping:
            c, a, b, f, d, e = (float(v) for v in mapping["GeoTransform"].split())
            transform = (a, b, c, d, e, f)
    if transform is None:
        return crs, None
    a, b, c, d, e, f = (float(v) for v in transform)
    return crs, (a, b, c, d, e, f)
