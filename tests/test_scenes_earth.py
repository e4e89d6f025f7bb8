"""The shipped scene against its sources, and the colour lookup baseline against its figure."""

from __future__ import annotations

import hashlib
import pickle
from importlib.resources import files

import numpy as np
import pytest
import rasterio
from PIL import Image

from bigunet.errors import SceneError
from bigunet.scenes import (
    EARTH_CLASSES,
    EARTH_SHAPE,
    check_classes,
    colour_lookup_baseline,
    earth,
    earth_split,
    held_out_labels,
    land_mean_iou,
    read_block,
    read_labels,
    synthetic,
    training_labels,
)

FOLDER = files("bigunet").joinpath("data", "earth")


@pytest.fixture(scope="module")
def scene():
    return earth()


def test_files_are_the_published_ones_and_small():
    sums = {
        "bmng.jpg": "10f5389b365d7ece89f68a73ce5653fb5692145fde181fc64596d0d87cb89bb8",
        "MCD12C1.A2019001.006.2020220162300.tif": (
            "a253c7643966d99580dacc890fedbe78417ca0dcb4c45845b41b838369c975ad"
        ),
    }
    for name, want in sums.items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == want
        assert name in (FOLDER / "README.md").read_text()
    assert sum(len(f.read_bytes()) for f in FOLDER.iterdir()) < 4e6


def test_pixels_and_labels_against_the_files(scene):
    assert scene.shape == EARTH_SHAPE
    assert scene.image.sizes["band"] == 3
    with Image.open(str(FOLDER / "bmng.jpg")) as image:
        full = np.asarray(image)
    np.testing.assert_array_equal(
        read_block(scene.image, 0, 50, 100, 200), full[300:350, 100:200].transpose(2, 0, 1)
    )
    with rasterio.open(str(FOLDER / "MCD12C1.A2019001.006.2020220162300.tif")) as data:
        igbp = data.read(1)
    group = {0: 0, **dict.fromkeys(range(1, 6), 1), 6: 2, 7: 2, 8: 3, 9: 3, 10: 4, 11: 4}
    group |= {12: 5, 13: 5, 14: 5, 15: 6, 16: 7}
    labels = scene.labels.values
    for row, column in np.random.default_rng(0).integers(0, EARTH_SHAPE, (500, 2)):
        source = igbp[int((row + 300.5) * 4 / 3), int((column + 0.5) * 4 / 3)]
        assert labels[row, column] == group[int(source)]
    check_classes(scene.labels, len(EARTH_CLASSES))


def test_coordinates_are_degrees_of_pixel_centres(scene):
    assert scene.image.attrs["crs"] == scene.labels.attrs["crs"] == "EPSG:4326"
    for data in (scene.image, scene.labels):
        assert float(data.y[0]) == pytest.approx(70 - 1 / 30, abs=1e-9)
        assert float(data.y[-1]) == pytest.approx(-60 + 1 / 30, abs=1e-9)
        assert float(data.x[0]) == pytest.approx(-180 + 1 / 30, abs=1e-9)
    names = [EARTH_CLASSES.names[int(scene.labels.sel(y=y, x=x, method="nearest"))]
             for y, x in [(0, -30), (-3, -65), (23, 10), (68, -45)]]  # fmt: skip
    assert names == ["water", "forest", "barren", "snow and ice"]  # Atlantic, Amazon, Sahara, ...


def test_alignment_is_the_best_shift(scene):
    """Blue, dark pixels are water: agreement with the label peaks at shift (0, 0)."""
    image, water = scene.image.values.astype(int), scene.labels.values == 0
    blue = (image[2] > image[0] + 10) & (image.sum(0) < 260)
    agree = {
        (i, j): (np.roll(blue, (i, j), (0, 1)) == water).mean()
        for i in (-2, -1, 0, 1, 2)
        for j in (-2, -1, 0, 1, 2)
    }
    assert max(agree, key=agree.get) == (0, 0)
    assert agree[0, 0] > 0.97


def test_split_by_blocks(scene):
    held_out = earth_split()
    assert held_out.shape == EARTH_SHAPE
    for row, column in np.random.default_rng(1).integers(0, EARTH_SHAPE, (200, 2)):
        assert held_out[row, column] == ((row // 130 + 2 * (column // 150)) % 4 == 0)
    train, test = training_labels(scene.labels), held_out_labels(scene.labels)
    assert train.attrs == scene.labels.attrs
    assert train.dtype == np.uint8
    window = (100, 400, 100, 500)
    a, b = read_labels(train, *window), read_labels(test, *window)
    full, held = read_labels(scene.labels, *window), held_out[100:400, 100:500]
    np.testing.assert_array_equal(a, np.where(held, 255, full))
    np.testing.assert_array_equal(b, np.where(held, full, 255))
    assert 0.2 < held_out.mean() < 0.3


def test_a_crop_keeps_its_place_in_the_split(scene):
    window = (77, 400, 1234, 1800)
    whole = held_out_labels(scene.labels).values[77:400, 1234:1800]
    np.testing.assert_array_equal(held_out_labels(scene.crop(*window).labels).values, whole)
    np.testing.assert_array_equal(
        earth_split(scene.labels[77:400, 1234:1800]), earth_split()[77:400, 1234:1800]
    )


def test_the_split_is_of_the_earth_only(scene):
    with pytest.raises(SceneError, match="Earth"):
        held_out_labels(synthetic((200, 200)).labels)
    with pytest.raises(SceneError, match="Earth"):
        training_labels(scene.labels[::2, ::2])


def test_colour_lookup_baseline(scene):
    result = colour_lookup_baseline(scene)
    assert result.land_mean_iou == pytest.approx(0.465, abs=0.0005)
    assert result.confusion.sum() == earth_split().sum()
    assert result.iou[0] == pytest.approx(0.988, abs=0.001)


def test_land_mean_iou_by_hand():
    # True rows, predicted columns. Class 1: 3 hits, union 3 + 1 (from water) + 2; class 2: 4 of 6.
    confusion = np.array([[9, 1, 0], [0, 3, 2], [0, 0, 4]])
    assert land_mean_iou(confusion) == pytest.approx((3 / 6 + 4 / 6) / 2)


def test_survives_pickling(scene):
    image = pickle.loads(pickle.dumps(scene.image))
    np.testing.assert_array_equal(
        read_block(image, 5, 20, 5, 30), read_block(scene.image, 5, 20, 5, 30)
    )
