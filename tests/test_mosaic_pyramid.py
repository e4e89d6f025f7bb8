"""Pyramids against brute force: majority of labels, mean of imagery."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from bigunet.errors import OutputError
from bigunet.mosaic import IGNORE, average, build_image_pyramid, majority, num_levels, pyramid


def vote(values: list[int]) -> int:
    """The stated rule, one square at a time."""
    voting = [v for v in values if v != IGNORE]
    if not voting:
        return IGNORE
    most = max(voting.count(v) for v in voting)
    return min(v for v in voting if voting.count(v) == most)


def halved(labels: np.ndarray) -> np.ndarray:
    height, width = labels.shape
    out = np.empty((-(-height // 2), -(-width // 2)), np.uint8)
    for y, x in np.ndindex(out.shape):
        out[y, x] = vote(labels[2 * y : 2 * y + 2, 2 * x : 2 * x + 2].ravel().tolist())
    return out


def test_every_square_of_four_classes_and_ignored_pixels() -> None:
    squares = np.array(list(product([0, 1, 2, 3, IGNORE], repeat=4)), np.uint8)
    found = majority(squares.reshape(-1, 2).copy())
    expected = [vote(square.tolist()) for square in squares]
    np.testing.assert_array_equal(found[:, 0], expected)


@pytest.mark.parametrize("shape", [(8, 8), (7, 10), (10, 7), (5, 5), (1, 1), (1, 6)])
def test_odd_sizes_vote_among_the_pixels_there_are(shape: tuple[int, int]) -> None:
    labels = np.random.default_rng(0).choice(
        np.array([0, 1, 2, IGNORE], np.uint8), shape, p=[0.3, 0.3, 0.2, 0.2]
    )
    np.testing.assert_array_equal(majority(labels), halved(labels))


def test_levels_in_memory_equal_brute_force_and_keep_their_place() -> None:
    labels = np.random.default_rng(0).integers(0, 5, (1101, 1030), dtype=np.uint8)
    y, x = 500.0 - 2.0 * (np.arange(1101) + 0.5), 10.0 + 2.0 * (np.arange(1030) + 0.5)
    data = xr.DataArray(labels, dims=("y", "x"), coords={"y": y, "x": x}, name="labels")
    levels = pyramid(data.to_dataset())
    assert [level.shape for level in levels] == [(1101, 1030), (551, 515), (276, 258)]
    np.testing.assert_array_equal(levels[1].values, halved(labels))
    np.testing.assert_array_equal(levels[2].values, halved(halved(labels)))
    # A coarse pixel's centre lies between the centres of those it stands for.
    np.testing.assert_allclose(levels[1]["x"].values[:515], (x[0::2] + x[1::2]) / 2)
    np.testing.assert_allclose(levels[1]["y"].values[:550], (y[0:1100:2] + y[1:1100:2]) / 2)


def test_number_of_levels() -> None:
    sides = (1, 512, 513, 1024, 1025, 10_000, 100_000)
    assert [num_levels((n, 1)) for n in sides] == [0, 0, 1, 1, 2, 5, 8]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32"])
def test_averages_leave_out_what_does_not_count(dtype: str) -> None:
    rng = np.random.default_rng(0)
    block = rng.integers(0, 250, (2, 7, 9)).astype(dtype)
    nodata = 7.0 if dtype != "float32" else None
    gaps = rng.random((2, 7, 9)) < 0.3
    block[gaps] = 7 if nodata is not None else np.nan
    found = average(block, nodata)
    assert found.dtype == block.dtype
    for b, y, x in np.ndindex(found.shape):
        square = block[b, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].astype(float).ravel()
        square = square[~np.isnan(square) & (square != nodata)]
        if not square.size:
            assert found[b, y, x] == 7 if nodata is not None else np.isnan(found[b, y, x])
        elif dtype == "float32":
            assert found[b, y, x] == pytest.approx(square.mean(), rel=1e-6)
        else:
            assert found[b, y, x] == np.floor(square.mean() + 0.5)


def test_image_pyramids_are_stored_and_placed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (3, 1030, 1500), dtype=np.uint8)
    coords = {"y": 100 - 0.5 * (np.arange(1030) + 0.5), "x": 0.5 * (np.arange(1500) + 0.5)}
    scene = xr.DataArray(data, dims=("band", "y", "x"), coords=coords, attrs={"crs": "EPSG:4326"})
    levels = build_image_pyramid(scene, tmp_path / "view.zarr")
    assert [level.shape for level in levels] == [(3, 1030, 1500), (3, 515, 750), (3, 258, 375)]
    np.testing.assert_array_equal(levels[1].values, average(data))
    np.testing.assert_array_equal(levels[2].values, average(average(data)))
    assert levels[2].attrs["crs"] == "EPSG:4326"
    assert levels[1]["x"].values[:2].tolist() == [0.5, 1.5]
    with pytest.raises(OutputError, match="which exists"):
        build_image_pyramid(scene, tmp_path / "view.zarr")
