"""Half the resolution against brute force: labels never mixed, imagery averaged."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from bigunet.downscale import IGNORE, average, majority


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


@pytest.mark.parametrize("dtype", ["uint8", "int16"])
@pytest.mark.parametrize("shape", [(8, 8), (7, 9), (1, 5)])
def test_majority_equals_counting(shape: tuple[int, int], dtype: str) -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        labels = generator.choice([0, 1, 2, IGNORE], size=shape).astype(dtype)
        assert majority(labels).dtype == dtype
        assert np.array_equal(majority(labels), voted(labels))


def test_average_rounds_halves_up_and_keeps_the_type() -> None:
    block = np.array([[[0, 1], [1, 0]], [[255, 255], [254, 255]]], np.uint8)
    assert average(block).tolist() == [[[1]], [[255]]]
    assert average(block).dtype == np.uint8
    assert average(block.astype(np.float32) / 4).tolist() == [[[0.125]], [[63.6875]]]
    tall = np.full((1, 2, 2), 2**31, np.uint32)
    assert average(tall).tolist() == [[[2**31]]]


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32"])
def test_whole_squares_are_averaged_as_the_others_are(dtype: str) -> None:
    info = np.iinfo(dtype)
    block = np.random.default_rng(0).integers(info.min, info.max, (2, 8, 6), dtype, endpoint=True)
    # One more column sends it the general way.
    wider = np.pad(block, [(0, 0), (0, 0), (0, 1)], mode="edge")
    assert np.array_equal(average(block), average(wider)[..., :3])
    exact = block.astype(float).reshape(2, 4, 2, 3, 2).mean(axis=(2, 4))
    assert np.array_equal(average(block), np.floor(exact + 0.5))
