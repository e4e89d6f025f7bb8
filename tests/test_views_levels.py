"""Resolution levels against brute force: labels never mixed, imagery averaged."""

from __future__ import annotations

import numpy as np
import pytest

from bigunet.downscale import average, majority
from bigunet.errors import ShapeError
from bigunet.views.levels import Levels, rgb_view


def test_levels_are_taken_where_given_and_made_where_not() -> None:
    labels = np.random.default_rng(1).integers(0, 5, (2500, 70)).astype(np.uint8)
    once = majority(labels[:64])
    levels = Levels(labels, majority)
    # Strips of an even number of rows give what the whole array gives.
    assert np.array_equal(levels.read(1, 0, 32, 0, 35), once)
    assert np.array_equal(levels.read(2, 0, 600, 0, 18), majority(majority(labels))[:600])
    given = np.full((1250, 35), 9, np.uint8)
    assert (Levels([labels, given], majority).read(1, 0, 5, 0, 5) == 9).all()


def test_the_level_suits_the_screen() -> None:
    levels = Levels(np.zeros((10_000, 10_000), np.uint8), majority)
    assert [levels.pick((view, view), 400) for view in (100, 799, 800, 1600, 10_000)] == [
        0,
        0,
        1,
        2,
        4,
    ]


def test_any_imagery_becomes_rgb() -> None:
    bytes_ = np.arange(48, dtype=np.uint8).reshape(3, 4, 4)
    shown = rgb_view(Levels(bytes_, average))(bytes_)
    assert np.array_equal(shown, np.moveaxis(bytes_, 0, -1))
    grey = np.linspace(1000, 3000, 64).reshape(1, 8, 8)
    grey[0, 0, 0] = np.nan
    shown = rgb_view(Levels(grey, average))(grey)
    assert shown.shape == (8, 8, 3)
    assert shown.dtype == np.uint8
    assert (shown[..., 0] == shown[..., 2]).all()
    assert shown.min() == 0
    assert shown.max() == 255
    many = np.zeros((13, 4, 4), np.uint16)
    assert rgb_view(Levels(many, average))(many).shape == (4, 4, 3)
    with pytest.raises(ShapeError):
        rgb_view(Levels(np.zeros((4, 4)), average))
