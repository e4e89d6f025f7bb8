"""Tiles read from scenes: padding, symmetries, brightness, pixels that do not count."""

from __future__ import annotations

import dask.array
import numpy as np
import pytest
import torch
import xarray as xr

from bigunet.augment import SYMMETRIES, apply, turned_tile
from bigunet.errors import SceneError
from bigunet.model import pad_to_stride
from bigunet.scenes import Normalise
from bigunet.spec import UNetSpec
from bigunet.tile_reader import Sample, TileReader
from bigunet.tiles import Box, tile_image

SPEC = UNetSpec(levels=3, convs=1, channels=2)
RNG = np.random.default_rng(0)
IMAGE = RNG.integers(0, 256, (3, 30, 45), np.uint8)
LABELS = RNG.integers(0, 2, (30, 45), np.uint8)


def test_read_boxes_are_cut_from_the_padded_image() -> None:
    reader = TileReader.of(SPEC, IMAGE, LABELS)
    padded = pad_to_stride(torch.from_numpy(IMAGE).float()[None], 4)[0].numpy()
    for tile in tile_image((30, 45), 8, SPEC):
        np.testing.assert_array_equal(
            reader.pixels(Sample(tile)), padded[(slice(None), *tile.read.slices)]
        )
        np.testing.assert_array_equal(reader.truth(Sample(tile)), LABELS[tile.write.slices])


@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_turned_samples_are_cut_from_the_turned_image(symmetry: int) -> None:
    reader = TileReader.of(SPEC, IMAGE, LABELS)
    padded = np.pad(IMAGE, ((0, 0), (0, 2), (0, 3)), mode="edge")
    truth = np.pad(LABELS, ((0, 2), (0, 3)), constant_values=9)
    for core in (Box(0, 8, 0, 8), Box(24, 32, 40, 48), Box(8, 20, 12, 32)):
        tile = turned_tile(core, (30, 45), SPEC, symmetry)
        sample = Sample(tile, symmetry)
        turned = apply(padded, symmetry)
        np.testing.assert_array_equal(
            reader.pixels(sample), turned[(slice(None), *tile.read.slices)]
        )
        np.testing.assert_array_equal(
            reader.truth(sample), apply(truth, symmetry)[tile.write.slices]
        )


def test_normalised_then_made_brighter() -> None:
    reader = TileReader.of(SPEC, IMAGE, LABELS, normalise=Normalise((1, 2, 3), (2, 4, 8)))
    tile = tile_image((30, 45), 32, SPEC)[0]
    values = reader.pixels(Sample(tile, 0, (1.0, 2.0, 1.0), (0.0, 0.0, 5.0)))
    expected = (IMAGE[:, 5, 6] - np.array([1, 2, 3])) / np.array([2, 4, 8])
    np.testing.assert_allclose(
        values[:, 5, 6], expected * [1, 2, 1] + [0, 0, 5], rtol=1e-6, atol=1e-6
    )


def test_pixels_that_do_not_count_are_not_labelled() -> None:
    image = IMAGE.astype(np.float32)
    image[1, 3, 4], image[0, 5, 6] = np.nan, np.inf
    scene = xr.DataArray(image, dims=("band", "y", "x"), attrs={"nodata": -7.0})
    scene[2, 7, 8] = -7.0
    reader = TileReader.of(SPEC, scene, LABELS)
    tile = tile_image((30, 45), 32, SPEC)[0]
    truth, pixels = reader.truth(Sample(tile)), reader.pixels(Sample(tile))
    expected = LABELS[tile.write.slices].astype(int)
    for y, x in ((3, 4), (5, 6), (7, 8)):
        expected[y, x] = 255
        assert pixels[:, y, x].tolist() == [0, 0, 0]
    np.testing.assert_array_equal(truth, expected)
    assert np.isfinite(pixels).all()


def test_cached_is_the_same_in_memory() -> None:
    image = xr.DataArray(dask.array.from_array(IMAGE, chunks=(3, 16, 16)), dims=("band", "y", "x"))
    labels = xr.DataArray(dask.array.from_array(LABELS, chunks=16), dims=("y", "x"))
    lazy = TileReader.of(SPEC, image, labels)
    small = lazy.cached(LABELS.nbytes)
    assert isinstance(small.labels.data, np.ndarray)
    assert not isinstance(small.image.data, np.ndarray)
    sample = Sample(tile_image((30, 45), 8, SPEC)[7])
    both = lazy.cached(10**6)
    np.testing.assert_array_equal(both.pixels(sample), lazy.pixels(sample))
    np.testing.assert_array_equal(both.truth(sample), lazy.truth(sample))


@pytest.mark.parametrize(
    ("image", "labels", "text"),
    [
        (IMAGE[:1], LABELS, "3 input channels needs as many bands; got 1 bands"),
        (IMAGE, LABELS[:-1], "same number of rows"),
        (IMAGE, LABELS.astype(float), "labels are integers"),
        (IMAGE[None], LABELS, "axes band, y, x"),
    ],
)
def test_bad_input(image: np.ndarray, labels: np.ndarray, text: str) -> None:
    with pytest.raises(SceneError, match=text):
        TileReader.of(SPEC, image, labels)
