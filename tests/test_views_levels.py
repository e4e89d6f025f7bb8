"""Resolution levels against brute force: labels never mixed, imagery averaged."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from bigunet.errors import ShapeError
from bigunet.views.levels import IGNORE, Levels, average, majority, rgb_view


def voted(labels: np.ndarray) -> np.ndarray:
    """Each 2 x 2 square's most frequent label, counted one by one."""
    padded = np.pad(labels, [(0, n % 2) for n in labels.shape], mode="edge")
    out = np.empty([n // 2 for n in padded.shape], labels.dtype)
    for y, x in np.ndindex(*out.shape):
        square = padded[2 * y : 2 * y + 2, 2 * x : 2 * x + 2].ravel().tolist()
        counts = Counter(label for label in square if label != IGNORE)
        best = max(counts.values(), default=0)
        out[y, x] = min((k for k, n in counts.items() if n == best), default=IGNORE)
    return out


@pytest.mark.parametrize("shape", [(8, 8), (7, 9), (1, 5)])
def test_majority_equals_counting(shape: tuple[int, int]) -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        labels = generator.choice([0, 1, 2, IGNORE], size=shape).astype(np.uint8)
        assert np.array_equal(majority(labels), voted(labels))


def test_average_rounds_halves_up_and_keeps_the_type() -> None:
    block = np.array([[[0, 1], [1, 0]], [[255, 255], [254, 255]]], np.uint8)
    assert average(block).tolist() == [[[1]], [[255]]]
    assert average(block).dtype == np.uint8
    assert average(block.astype(np.float32) / 4).tolist() == [[[0.125]], [[63.6875]]]
    tall = np.full((1, 2, 2), 2**31, np.uint32)
    assert average(tall).tolist() == [[[2**31]]]


def test_levels_are_taken_where_given_and_made_where_not() -> None:
    labels = np.random.default_rng(1).integers(0, 5, (2500, 70)).astype(np.uint8)
    once = voted(labels[:64])
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
