"""How much ground each class of a label map covers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from rasterio.crs import CRS
from rasterio.errors import CRSError

from bigunet.errors import SceneError, fail
from bigunet.scenes import ClassTable, geotransform, iter_blocks, read_labels

__all__ = ["class_areas", "row_areas_km2"]

#: Semi-major axis in km and squared eccentricity of the WGS 84 ellipsoid (NGA.STND.0036, 2014).
_A_KM = 6378.137
_E2 = 6.69437999014e-3


def class_areas(
    labels: xr.DataArray, classes: ClassTable | Sequence[str] | None = None, *, ignore: int = 255
) -> xr.Dataset:
    """Pixels, share and ground area of each class, read block by block.

    Dim `class`: `pixels`; `share` of the pixels that count, and, where the labels have a CRS,
    `area` in km2. In degrees, a pixel's area is that of its cell on the WGS 84 ellipsoid; in a
    projection it is what the projection makes of it, which is the ground's only where that
    preserves areas (UTM is within 0.1 %, Web Mercator is not).

    Parameters
    ----------
    labels : (y, x) class ids, such as a mosaic's; its attrs may carry `classes`.
    classes : a class table or names, by default the labels' own.

    Raises
    ------
    SceneError : for a class id without a name, or no classes known.
    """
    names = _names(labels, classes)
    cells = row_areas_km2(labels)
    pixels = np.zeros(len(names), np.int64)
    areas = np.zeros(len(names))
    for y0, y1, x0, x1 in iter_blocks((labels.shape[0], labels.shape[1])):
        ids = read_labels(labels, y0, y1, x0, x1)
        kept = ids != ignore
        if kept.any() and not (ids[kept].min() >= 0 and ids[kept].max() < len(names)):
            fail(
                SceneError,
                rule=f"every label is a class, 0 to {len(names) - 1}, or {ignore}",
                got=int(ids[kept].max()),
                remedy="Pass the class table that the map was made with.",
            )
        for k in range(len(names)):
            rows = (ids == k).sum(axis=1)
            pixels[k] += int(rows.sum())
            if cells is not None:
                areas[k] += float(rows @ cells[y0:y1])
    total = int(pixels.sum())
    table = xr.Dataset(
        {
            "pixels": ("class", pixels, {"units": "pixels"}),
            "share": ("class", pixels / max(1, total), {"units": "1"}),
        },
        coords={"class": list(names)},
    )
    if cells is not None:
        table["area"] = ("class", areas, {"units": "km2"})
    return table


def _names(labels: xr.DataArray, classes: Any) -> tuple[str, ...]:
    table = labels.attrs.get("classes") if classes is None else classes
    if table is None:
        fail(SceneError, rule="the classes are known", got=None, remedy="Pass `classes`.")
    if isinstance(table, dict):
        table = table["names"]
    return tuple(getattr(table, "names", table))


def row_areas_km2(scene: xr.DataArray) -> np.ndarray | None:
    """Ground area of one pixel in each row, km2; None where the scene has no CRS.

    Raises
    ------
    SceneError : for a CRS that is not understood, or degrees on a rotated grid.
    """
    if not scene.attrs.get("crs"):
        return None
    try:
        crs = CRS.from_user_input(scene.attrs["crs"])
    except CRSError as error:
        fail(SceneError, rule="the CRS is understood", got=error, remedy="Give it as EPSG:n.")
    a, b, _, d, e, f = geotransform(scene)
    height = scene.shape[-2]
    if crs.is_geographic:
        if b or d:
            fail(
                SceneError,
                rule="areas in degrees are of rows that follow a parallel",
                got="a rotated grid",
                remedy="Warp the scene to a grid that is not rotated.",
            )
        edges = np.clip(f + e * np.arange(height + 1), -90, 90)
        north = _zone_km2_per_radian(np.radians(edges))
        return np.asarray(np.abs(np.diff(north)) * math.radians(abs(a)))
    metres = float(crs.linear_units_factor[1])
    return np.full(height, abs(a * e - b * d) * metres**2 / 1e6)


def _zone_km2_per_radian(latitude: np.ndarray) -> np.ndarray:
    """Area between the equator and a latitude (radians), for one radian of longitude.

    Source: Snyder, Map Projections: A Working Manual (USGS Professional Paper 1395, 1987),
    equation 3-12: q, of which this is a^2 / 2.
    """
    e, sine = math.sqrt(_E2), np.sin(latitude)
    q = (1 - _E2) * (sine / (1 - _E2 * sine**2) + np.arctanh(e * sine) / e)
    return np.asarray(_A_KM**2 / 2 * q)
