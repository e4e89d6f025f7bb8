"""Write a pair to disk block by block, for benchmarks and for handing on."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import rasterio
import xarray as xr
import zarr
from rasterio.errors import NotGeoreferencedWarning
from rasterio.transform import Affine
from rasterio.windows import Window
from tqdm.auto import tqdm

from ..errors import OutputError, fail
from .formats import GDAL_CACHE_BYTES
from .open import geotransform, read_block, read_labels
from .pairs import ScenePair, iter_blocks

__all__ = ["write_scene"]


def write_scene(
    scene: ScenePair,
    path: str | Path,
    *,
    format: Literal["zarr", "geotiff"] = "zarr",
    block: int = 1024,
    progress: bool = False,
) -> Path:
    """Write image and labels under `path`, one block in memory at a time; returns `path`.

    zarr: a group (format 3) with the arrays `image` (band, y, x), `labels` (y, x), `y` and `x`;
    `open_scene(path)` and `open_labels(path)` open it; one that was not finished is refused.
    geotiff: the folder `path` with `image.tif`, `labels.tif` (tiled, deflate) and, with a class
    table, `classes.json`. Raises `OutputError` for an existing path or one that cannot be written.
    """
    path = Path(path)
    if path.exists():
        fail(
            OutputError,
            rule="a scene is written to a new path",
            got=f"{path}, which exists",
            remedy="Choose another path, or remove that one",
        )
    if format not in ("zarr", "geotiff"):
        fail(OutputError, rule="format is 'zarr' or 'geotiff'", got=format, remedy="Take 'zarr'")
    if format == "zarr" and path.suffix != ".zarr":
        fail(
            OutputError,
            rule="the name of a Zarr scene ends in .zarr",
            got=str(path),
            remedy=f"Write to {path.name}.zarr, so that open_scene knows the format",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        (_write_zarr if format == "zarr" else _write_geotiff)(scene, path, block, progress)
    except (OSError, rasterio.errors.RasterioError) as error:
        fail(
            OutputError,
            rule="the output must be writable, with room for the scene",
            got=f"{path}: {error}",
            remedy="Choose a folder that you may write to, on a disk with room; what was written "
            "is incomplete and may be removed",
        )
    return path


def _plain(attrs: dict[Any, Any]) -> dict[str, Any]:
    keep = ("crs", "nodata", "classes", "ignore", "credit", "units", "standard_name")
    return {k: attrs[k] for k in keep if k in attrs}


def _write_zarr(scene: ScenePair, path: Path, block: int, progress: bool) -> None:
    group = zarr.open_group(str(path), mode="w-", zarr_format=3)
    for axis in ("y", "x"):
        values = scene.image[axis]
        array = group.create_array(
            axis, shape=values.shape, dtype="float64", dimension_names=(axis,)
        )
        array[:] = values.values
        array.attrs.update(_plain(values.attrs))
    arrays = {}
    for name, data in (("image", scene.image), ("labels", scene.labels)):
        chunks = tuple(min(block, n) if d in "yx" else n for d, n in data.sizes.items())  # type: ignore[operator]
        arrays[name] = group.create_array(
            name,
            shape=data.shape,
            dtype=data.dtype,
            chunks=chunks,
            dimension_names=[str(d) for d in data.dims],
            attributes={
                **_plain(data.attrs),
                "transform": geotransform(data),
                "complete": False,
            },
            # Chunks that are all fill value are written too: a missing file is then a loss.
            config={"write_empty_chunks": True},
        )
    for y0, y1, x0, x1 in _windows(scene, block, progress):
        arrays["image"][:, y0:y1, x0:x1] = read_block(scene.image, y0, y1, x0, x1)
        arrays["labels"][y0:y1, x0:x1] = read_labels(scene.labels, y0, y1, x0, x1)
    for array in arrays.values():
        array.attrs["complete"] = True


def _write_geotiff(scene: ScenePair, path: Path, block: int, progress: bool) -> None:
    path.mkdir()
    with (
        rasterio.Env(GDAL_CACHEMAX=GDAL_CACHE_BYTES),
        warnings.catch_warnings(action="ignore", category=NotGeoreferencedWarning),
        _create(path / "image.part.tif", scene.image) as image,
        _create(path / "labels.part.tif", scene.labels) as labels,
    ):
        for y0, y1, x0, x1 in _windows(scene, block, progress):
            window = Window(x0, y0, x1 - x0, y1 - y0)
            image.write(read_block(scene.image, y0, y1, x0, x1), window=window)
            labels.write(read_labels(scene.labels, y0, y1, x0, x1), 1, window=window)
    # Blocks not yet written would read as nodata: only a finished file gets its name.
    for name in ("image", "labels"):
        (path / f"{name}.part.tif").rename(path / f"{name}.tif")
    if scene.classes is not None:
        (path / "classes.json").write_text(json.dumps(scene.classes.to_dict(), indent=1))


def _create(path: Path, data: xr.DataArray) -> Any:
    nodata = data.attrs.get("nodata", data.attrs.get("ignore"))
    if nodata is not None and data.dtype.kind in "ui":
        limits = np.iinfo(data.dtype)
        nodata = nodata if limits.min <= nodata <= limits.max else None
    crs = data.attrs.get("crs")
    transform = Affine(*geotransform(data))
    return rasterio.open(
        path,
        "w",
        driver="GTiff",
        width=data.shape[-1],
        height=data.shape[-2],
        count=data.shape[0] if data.ndim == 3 else 1,
        dtype=str(data.dtype),
        crs=crs,
        transform=None if transform.is_identity else transform,
        nodata=nodata,
        tiled=True,
        blockxsize=512,
        blockysize=512,
        compress="deflate",
        BIGTIFF="IF_SAFER",
    )


def _windows(scene: ScenePair, block: int, progress: bool) -> Any:
    windows = list(iter_blocks(scene.shape, block))
    return tqdm(windows, desc="writing", unit="block", disable=not progress)
