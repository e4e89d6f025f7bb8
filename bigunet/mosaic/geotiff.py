"""A finished Zarr mosaic as GeoTIFF, window by window."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from rasterio.errors import NotGeoreferencedWarning
from rasterio.transform import Affine
from rasterio.windows import Window

from bigunet.mosaic.pyramid import IGNORE
from bigunet.scenes import ClassTable

__all__ = ["TAG", "probabilities_path", "write_labels", "write_probabilities"]

#: The file's tag that holds the mosaic's attributes as JSON.
TAG = "BIGUNET_MOSAIC"
_BLOCK = 512


def probabilities_path(out: Path) -> Path:
    """Where the probabilities of the GeoTIFF `out` lie."""
    return out.with_name(f"{out.stem}.probabilities{out.suffix}")


def write_labels(
    path: Path, labels: Any, attrs: Mapping[str, Any], classes: ClassTable, place: Mapping[str, Any]
) -> None:
    """uint8 labels (y, x) with a colour table, nodata 255, CRS and transform."""
    colours = {i: (*map(int, rgb), 255) for i, rgb in enumerate(classes.rgb)}
    colours[IGNORE] = (0, 0, 0, 0)

    def describe(file: Any) -> None:
        file.write_colormap(1, colours)
        file.update_tags(**{TAG: json.dumps(attrs, sort_keys=True)})

    _write(path, labels, 1, "uint8", IGNORE, place, describe)


def write_probabilities(path: Path, shares: Any, names: tuple[str, ...], place: Any) -> None:
    """Probabilities (class, y, x), one band a class, fp32 or uint8 (times 255)."""
    dtype = "uint8" if shares.dtype == np.uint8 else "float32"

    def describe(file: Any) -> None:
        for band, name in enumerate(names[-shares.shape[0] :], start=1):
            file.set_band_description(band, name)

    nodata = None if dtype == "uint8" else float("nan")
    _write(path, shares, shares.shape[0], dtype, nodata, place, describe)


def _write(
    path: Path,
    array: Any,
    bands: int,
    dtype: str,
    nodata: float | None,
    place: Mapping[str, Any],
    describe: Callable[[Any], None],
) -> None:
    height, width = array.shape[-2:]
    profile: dict[str, Any] = {
        "driver": "GTiff",
        "height": height,
        "width": width,
        "count": bands,
        "dtype": dtype,
        "nodata": nodata,
        "tiled": True,
        "blockxsize": _BLOCK,
        "blockysize": _BLOCK,
        "compress": "deflate",
        "BIGTIFF": "IF_SAFER",
    }
    if place.get("crs"):
        profile["crs"] = place["crs"]
    if place.get("transform"):
        profile["transform"] = Affine(*place["transform"])
    path.unlink(missing_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotGeoreferencedWarning)
        with rasterio.open(path, "w", **profile) as file:
            describe(file)
            for y in range(0, height, _BLOCK):
                block = np.asarray(array[..., y : y + _BLOCK, :]).astype(dtype, copy=False)
                window = Window(0, y, width, block.shape[-2])
                file.write(block.reshape(bands, *block.shape[-2:]), window=window)
