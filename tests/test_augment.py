"""The eight symmetries: on arrays, on boxes, and on tiles of the turned image."""

from __future__ import annotations

import numpy as np
import pytest

from bigunet.augment import SYMMETRIES, apply, inverse, turn_box, turned_shape, turned_tile
from bigunet.spec import UNetSpec
from bigunet.tiles import Box


def test_the_eight_are_different_and_undone_by_their_inverse() -> None:
    array = np.arange(6).reshape(2, 3)
    seen = {apply(array, s).tobytes() + bytes(apply(array, s).shape) for s in SYMMETRIES}
    assert len(seen) == 8
    for symmetry in SYMMETRIES:
        np.testing.assert_array_equal(apply(apply(array, symmetry), inverse(symmetry)), array)


@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_a_turned_box_holds_the_turned_pixels(symmetry: int) -> None:
    rng = np.random.default_rng(symmetry)
    image = rng.integers(0, 1000, (11, 17))
    turned = apply(image, symmetry)
    assert turned.shape == turned_shape(image.shape, symmetry)
    for _ in range(20):
        y, x = rng.integers(0, 10), rng.integers(0, 16)
        box = Box(int(y), int(rng.integers(y + 1, 12)), int(x), int(rng.integers(x + 1, 18)))
        there = turn_box(box, image.shape, symmetry)
        expected = apply(image[box.slices], symmetry)
        np.testing.assert_array_equal(turned[there.slices], expected)


@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_a_turned_tile_writes_its_core_without_the_padding(symmetry: int) -> None:
    spec = UNetSpec(levels=3, convs=1, channels=2)
    shape, padded = (30, 45), (32, 48)
    image = np.pad(np.arange(30 * 45).reshape(shape), ((0, 2), (0, 3)), constant_values=-1)
    turned = apply(image, symmetry)
    for core in (Box(0, 16, 0, 16), Box(16, 32, 32, 48), Box(12, 28, 20, 36)):
        tile = turned_tile(core, shape, spec, symmetry)
        inside = core.clip(Box(0, 30, 0, 45))
        np.testing.assert_array_equal(
            turned[tile.write.slices], apply(image[inside.slices], symmetry)
        )
        grown = core.grow(spec.halo_aligned).clip(Box(0, 32, 0, 48))
        assert tile.read == turn_box(grown, padded, symmetry)
