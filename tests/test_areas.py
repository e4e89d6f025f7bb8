"""Areas of classes against the ellipsoid's known surface, an integral, and counting."""

from __future__ import annotations

import math

import numpy as np
import pytest
import xarray as xr

from bigunet.areas import class_areas, row_areas_km2
from bigunet.errors import SceneError
from bigunet.scenes import earth


def globe(rows: int, columns: int, **attrs: object) -> xr.DataArray:
    step = 180 / rows
    return xr.DataArray(
        np.zeros((rows, columns), np.uint8),
        dims=("y", "x"),
        coords={
            "y": 90 - step * (np.arange(rows) + 0.5),
            "x": -180 + 360 / columns * (np.arange(columns) + 0.5),
        },
        attrs={
            "crs": "EPSG:4326",
            "transform": (360 / columns, 0.0, -180.0, 0.0, -step, 90.0),
            **attrs,
        },
    )


def test_the_whole_earth_has_the_ellipsoids_surface() -> None:
    # 510,065,621.7 km2: H. Moritz, Geodetic Reference System 1980, whose ellipsoid is WGS 84's to
    # a tenth of a millimetre.
    table = class_areas(globe(37, 50), ["all"])
    assert float(table.area[0]) == pytest.approx(510_065_621.7, rel=1e-8)
    assert table.area.attrs["units"] == "km2"


def test_a_row_is_the_integral_over_its_latitudes() -> None:
    cells = row_areas_km2(globe(180, 360))
    assert cells is not None
    a, e2 = 6378.137, 6.69437999014e-3
    for row in (0, 29, 89, 140):
        phi = np.radians(90 - row - (np.arange(20_000) + 0.5) / 20_000)
        # Meridional times transverse radius of curvature times the parallel's cosine.
        width = 1 - e2 * np.sin(phi) ** 2
        small = a**2 * (1 - e2) / width**2 * np.cos(phi)
        integral = small.mean() * math.radians(1) ** 2
        assert cells[row] == pytest.approx(integral, rel=1e-7)


def test_classes_are_counted_and_ignored_pixels_are_not() -> None:
    labels = globe(4, 6)
    labels[0], labels[1], labels[2, :3] = 1, 2, 255
    table = class_areas(labels, ["a", "b", "c"])
    assert table.pixels.values.tolist() == [9, 6, 6]
    assert table.share.values.sum() == pytest.approx(1)
    # The rows are 45 degrees high: b's is nearest the pole, so it covers less than c's.
    assert float(table.area.sel({"class": "b"})) < float(table.area.sel({"class": "c"}))


def test_projected_and_bare_pixels() -> None:
    utm = globe(4, 6, crs="EPSG:32632", transform=(10.0, 0.0, 5e5, 0.0, -10.0, 5e6))
    utm = utm.assign_coords(y=5e6 - 10 * (np.arange(4) + 0.5), x=5e5 + 10 * (np.arange(6) + 0.5))
    assert float(class_areas(utm, ["all"]).area[0]) == pytest.approx(24 * 100 / 1e6)
    bare = globe(4, 6).drop_attrs()
    assert "area" not in class_areas(bare, ["all"])


def test_the_shipped_scene_has_its_own_names() -> None:
    scene = earth().crop(300, 500, 1000, 1200)
    table = class_areas(scene.labels)
    assert table["class"].values.tolist() == list(scene.classes.names)  # type: ignore[union-attr]
    assert int(table.pixels.sum()) == int((scene.labels.values != 255).sum())


def test_bad_input_is_told() -> None:
    labels = globe(4, 6)
    with pytest.raises(SceneError, match="classes are known"):
        class_areas(labels)
    labels[0, 0] = 7
    with pytest.raises(SceneError, match="0 to 1, or 255; got 7"):
        class_areas(labels, ["a", "b"])
    with pytest.raises(SceneError, match="CRS is understood"):
        class_areas(globe(4, 6, crs="nonsense"), ["a"])
    with pytest.raises(SceneError, match="rotated"):
        class_areas(globe(4, 6, transform=(1.0, 0.1, 0.0, 0.1, -1.0, 0.0)), ["a"])
