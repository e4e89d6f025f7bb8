"""Which tiles a step sees: a function of seed and step, on the lattice, around chosen classes."""

from __future__ import annotations

import numpy as np
import pytest

from bigunet.augment import inverse, turn_box, turned_shape
from bigunet.sampling import Sampler
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tile_reader import TileReader
from bigunet.tiles import Box, tile_image

SPEC = UNetSpec(levels=3, convs=1, channels=2, classes=3)
SHAPE = (303, 530)


def sampler(train: TrainSpec, *, whole: bool = False) -> Sampler:
    labels = np.zeros(SHAPE, np.uint8)
    labels[:, 300:] = 1
    labels[250, 7] = 2
    labels[:10] = 255
    reader = TileReader.of(SPEC, np.zeros((3, *SHAPE), np.uint8), labels)
    return Sampler.of(SPEC, train, reader, whole=whole)


def core_of(sample: object) -> Box:
    """The core in the unturned image."""
    tile, symmetry = sample.tile, sample.symmetry  # type: ignore[attr-defined]
    padded = turned_shape((304, 532), symmetry)
    return turn_box(tile.core, padded, inverse(symmetry))


def test_the_same_step_is_the_same_and_others_are_not() -> None:
    train = TrainSpec(tile=32, batch=4, jitter=0.1, seed=3)
    one, two = sampler(train), sampler(train)
    assert one.draw(7) == two.draw(7)
    assert one.draw(7) != one.draw(8)
    assert one.draw(7) != one.draw(7, stream=1)
    assert one.draw(7) != sampler(train.replace(seed=4)).draw(7)


def test_cores_lie_on_the_stride_inside_the_padded_image() -> None:
    draws = [s for i in range(200) for s in sampler(TrainSpec(tile=32, batch=2)).draw(i)]
    cores = [core_of(sample) for sample in draws]
    for core in cores:
        assert core.shape == (32, 32)
        assert core.y0 % 4 == core.x0 % 4 == 0
        assert 0 <= core.y0 <= 304 - 32
        assert 0 <= core.x0 <= 532 - 32
    assert {sample.symmetry for sample in draws} == set(range(8))
    plain = sampler(TrainSpec(tile=32, batch=20, augment=False)).draw(0)
    assert {sample.symmetry for sample in plain} == {0}


def test_focus_places_tiles_around_a_class() -> None:
    focused = sampler(TrainSpec(tile=32, batch=1, focus=(0.0, 1.0, 3.0)))
    cores = [core_of(focused.draw(i)[0]) for i in range(400)]
    rare = [core.y0 <= 250 < core.y1 and core.x0 <= 7 < core.x1 for core in cores]
    # Three in four around the one pixel of class 2; four standard deviations.
    assert abs(np.mean(rare) - 0.75) < 4 * (0.75 * 0.25 / 400) ** 0.5
    assert all(core.x1 > 300 for core, near in zip(cores, rare, strict=True) if not near)


def test_focus_takes_every_pixel_of_a_class_alike() -> None:
    focused = sampler(TrainSpec(tile=4, batch=1, focus=(0.0, 1.0, 0.0), augment=False))
    centres = np.array([[c.y0, c.x0] for c in (core_of(focused.draw(i)[0]) for i in range(2000))])
    # Evenly over rows 10 to 302 and columns 300 to 529: mean and spread of a uniform draw.
    for axis, (low, high) in enumerate(((10, 303), (300, 530))):
        spread = (high - low) / 12**0.5
        assert abs(centres[:, axis].mean() - (low + high) / 2 + 2) < 4 * spread / 2000**0.5
        assert abs(centres[:, axis].std() / spread - 1) < 0.06


def test_jitter_has_the_spread_it_says() -> None:
    drawn = sampler(TrainSpec(tile=32, batch=500, jitter=0.2)).draw(0)
    gains, offsets = (np.array([getattr(s, n) for s in drawn]) for n in ("gain", "offset"))
    assert abs(gains.mean() - 1) < 0.03
    assert abs(offsets.mean()) < 0.03
    assert gains.std() == pytest.approx(0.2, rel=0.1)
    assert offsets.std() == pytest.approx(0.2, rel=0.1)


def test_whole_takes_every_tile_turned_alike() -> None:
    whole = sampler(TrainSpec(tile=64), whole=True)
    for step in range(5):
        samples = whole.draw(step)
        assert len({sample.symmetry for sample in samples}) == 1
        cores = [core_of(sample) for sample in samples]
        assert cores == [tile.core for tile in tile_image(SHAPE, 64, SPEC)]


def test_a_given_halo_is_read() -> None:
    (sample,) = sampler(TrainSpec(tile=32, halo=0)).draw(0)
    assert sample.tile.read == sample.tile.core
