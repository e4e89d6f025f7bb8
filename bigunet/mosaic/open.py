"""Open finished mosaics, their pyramids, and build pyramids of imagery for viewing."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
import xarray as xr
import zarr
from rasterio.errors import NotGeoreferencedWarning

from bigunet.errors import OutputError, fail
from bigunet.mosaic.geotiff import TAG, probabilities_path
from bigunet.mosaic.pyramid import average, majority, num_levels, strips
from bigunet.mosaic.run import MARK
from bigunet.mosaic.store import CHUNK, disk_errors
from bigunet.scenes import ClassTable, open_labels, open_scene, read_block

__all__ = ["build_image_pyramid", "open_mosaic", "pyramid", "read_attrs"]


def read_attrs(path: Path) -> dict[str, Any] | None:
    """The attributes of a finished mosaic, or None where `path` is not one."""
    try:
        if path.is_dir():
            attrs = dict(zarr.open_group(str(path), mode="r").attrs)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NotGeoreferencedWarning)
                with rasterio.open(path) as file:
                    attrs = json.loads(file.tags().get(TAG, "{}"))
    except (OSError, ValueError, KeyError, rasterio.errors.RasterioError):
        return None
    return attrs if MARK in attrs else None


def open_mosaic(path: str | Path) -> xr.Dataset:
    """A mosaic that `segment` wrote, lazily: `labels` (y, x), `probabilities` (class, y, x).

    `attrs` say how it was made: spec, weights' hash, normalisation, classes, scene, precision,
    tile, halo, exactness, ignored pixels.

    Raises
    ------
    OutputError : where there is none, or one that is not finished.
    """
    path = Path(path)
    attrs = read_attrs(path) if path.exists() else None
    if attrs is None:
        partial = path.with_name(path.name + ".partial").exists()
        fail(
            OutputError,
            rule="a mosaic is a finished output of segment()",
            got=f"{path}, " + ("which is not finished" if partial else "which is none"),
            remedy="Run the same segment() again: it resumes." if partial else "Check the path.",
        )
    if path.is_dir():
        data: xr.Dataset = xr.open_zarr(path, consolidated=False, mask_and_scale=False)
    else:
        labels = open_labels(path, classes=ClassTable.from_dict(attrs["classes"]))
        data = xr.Dataset({"labels": labels}, attrs=attrs)
        shares = probabilities_path(path)
        if attrs["probabilities"] and shares.exists():
            data["probabilities"] = open_scene(shares).rename(band="class").drop_vars("class")
    if "probabilities" in data:
        names = ClassTable.from_dict(attrs["classes"]).names[-data.sizes["class"] :]
        data = data.assign_coords({"class": list(names)})
    data.encoding["source"] = str(path)
    return data


def pyramid(data: xr.Dataset | xr.DataArray) -> list[xr.DataArray]:
    """Labels from full resolution to the coarsest level, each half the size of the one before.

    Read lazily from a Zarr mosaic, which stores them; else computed, a strip at a time.
    """
    labels = data["labels"] if isinstance(data, xr.Dataset) else data
    levels = [labels]
    source = Path(str(data.encoding.get("source", ""))) if isinstance(data, xr.Dataset) else None
    stored = source is not None and (source / "pyramid").is_dir()
    for level in range(1, num_levels((labels.shape[0], labels.shape[1])) + 1):
        if stored:
            part = xr.open_zarr(
                source, group=f"pyramid/{level}", consolidated=False, mask_and_scale=False
            )
            levels.append(part["labels"])
        else:
            levels.append(_halve(levels[-1]))
    return levels


def _halve(labels: xr.DataArray) -> xr.DataArray:
    height, width = labels.shape
    out = np.empty((-(-height // 2), -(-width // 2)), np.uint8)

    def write(y: int, block: Any) -> None:
        out[y : y + block.shape[0]] = block

    strips(height, 2 * CHUNK, lambda a, b: np.asarray(labels[a:b].data), write, majority)
    coords = {axis: _halve_axis(labels, axis) for axis in ("y", "x")}
    attrs = {**labels.attrs, "factor": 2 * labels.attrs.get("factor", 1)}
    return xr.DataArray(out, dims=("y", "x"), coords=coords, attrs=attrs, name="labels")


def _halve_axis(data: xr.DataArray, axis: str) -> np.ndarray[Any, Any]:
    """Centres of pixels twice as wide, counted from the same corner."""
    values = np.asarray(data[axis].values, float)
    step = values[1] - values[0] if values.size > 1 else 1.0
    count = -(-values.size // 2)
    return np.asarray(values[0] - step / 2 + 2 * step * (np.arange(count) + 0.5))


def build_image_pyramid(scene: xr.DataArray, out: str | Path) -> list[xr.DataArray]:
    """Averaged levels of imagery for a viewer: [scene, level 1, ...], each lazy, stored in `out`.

    `out` is a new Zarr group with `pyramid/1/image` and on, chunks of 512 x 512; one level's
    strip of 1024 rows is in memory at a time. NaN and nodata pixels do not count in the mean.

    Raises
    ------
    OutputError : where `out` exists or cannot be written.
    """
    out = Path(out)
    if out.exists():
        fail(
            OutputError,
            rule="an image pyramid goes to a new path",
            got=f"{out}, which exists",
            remedy="Choose another path, or remove that one.",
        )
    nodata = scene.attrs.get("nodata")
    keep = {k: v for k, v in scene.attrs.items() if k in ("crs", "transform", "nodata", "credit")}
    levels = [scene]
    with disk_errors(str(out), "Remove what is there, and choose a disk with room."):
        group = zarr.open_group(str(out), mode="w-", zarr_format=3)
        above = scene
        for level in range(1, num_levels((scene.shape[1], scene.shape[2])) + 1):
            bands, height, width = above.shape
            shape = bands, -(-height // 2), -(-width // 2)
            array: Any = group.require_group(f"pyramid/{level}").create_array(
                "image",
                shape=shape,
                chunks=(bands, CHUNK, CHUNK),
                dtype=scene.dtype,
                dimension_names=("band", "y", "x"),
                attributes={**keep, "factor": 2**level},
            )

            def read(a: int, b: int, above: xr.DataArray = above, width: int = width) -> Any:
                return read_block(above, a, b, 0, width)

            def write(y: int, block: Any, array: Any = array) -> None:
                array[:, y : y + block.shape[1]] = block

            strips(height, 2 * CHUNK, read, write, lambda block: average(block, nodata))
            coords = {axis: _halve_axis(above, axis) for axis in ("y", "x")}
            opened = xr.open_zarr(
                out, group=f"pyramid/{level}", consolidated=False, mask_and_scale=False
            )["image"]
            above = opened.assign_coords(coords)
            levels.append(above)
    return levels
