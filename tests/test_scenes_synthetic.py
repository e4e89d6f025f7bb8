"""Synthetic land: one pixel is one pixel, whatever is asked for with it."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigunet.errors import SceneError
from bigunet.scenes import (
    SYNTHETIC_CLASSES,
    check_classes,
    open_labels,
    open_scene,
    pair,
    read_block,
    read_labels,
    synthetic,
    write_scene,
)
from bigunet.scenes.noise import value_noise

SIZE = 1400  # more than one inner piece of 1024 in both directions


@pytest.fixture(scope="module")
def whole():
    scene = synthetic((SIZE, SIZE), seed=3)
    return scene.image.compute().values, scene.labels.compute().values


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_window_is_the_slice_of_the_whole(whole, data):
    image, labels = whole
    y0, x0 = (data.draw(st.integers(0, SIZE - 1)) for _ in "yx")
    y1 = data.draw(st.integers(y0 + 1, min(SIZE, y0 + 300)))
    x1 = data.draw(st.integers(x0 + 1, min(SIZE, x0 + 300)))
    scene = synthetic((SIZE, SIZE), seed=3)
    np.testing.assert_array_equal(read_block(scene.image, y0, y1, x0, x1), image[:, y0:y1, x0:x1])
    np.testing.assert_array_equal(read_labels(scene.labels, y0, y1, x0, x1), labels[y0:y1, x0:x1])


@pytest.mark.parametrize("chunk", [97, 512])
def test_chunks_order_and_extent_do_not_matter(whole, chunk):
    other = synthetic((SIZE + 77, SIZE + 5), seed=3, chunk=chunk)
    part = other.image[:, :700, :900]
    np.testing.assert_array_equal(part.compute().values, whole[0][:, :700, :900])
    # Blocks in reverse order, from a scene whose arrays have been sliced already.
    got = np.zeros((700, 900), np.uint8)
    for y in range(600, -1, -100):
        for x in range(750, -1, -150):
            got[y : y + 100, x : x + 150] = read_labels(
                other.labels[:700, :900], y, y + 100, x, x + 150
            )
    np.testing.assert_array_equal(got, whole[1][:700, :900])


def test_far_corner_of_a_hundred_thousand():
    scene = synthetic((100_000, 100_000), seed=1)
    window = (99_700, 100_000, 99_600, 100_000)
    block = read_block(scene.image, *window)
    again = np.concatenate(
        [read_block(scene.image, 99_700, 100_000, x, x + 50) for x in range(99_600, 100_000, 50)],
        axis=2,
    )
    np.testing.assert_array_equal(block, again)
    assert block.std() > 5  # neither flat nor saturated
    assert scene.image.nbytes == 3 * 10**10
    assert (block < 255).all()


def test_every_class_occurs_and_colour_tells_something(whole):
    image, labels = whole
    share = np.bincount(labels.ravel(), minlength=5) / labels.size
    assert len(share) == len(SYNTHETIC_CLASSES) == 5
    assert (share > 0.002).all()
    assert share.max() < 0.9
    # Water is the only land that is bluer than green: independent of how it was painted in.
    water = labels == SYNTHETIC_CLASSES.names.index("water")
    bluer = image[2].astype(int) > image[1]
    assert bluer[water].mean() > 0.95 > 0.05 > bluer[labels == 0].mean()


def test_seeds_differ_and_repeat():
    a, b, c = (read_labels(synthetic((600, 600), s).labels, 0, 600, 0, 600) for s in (0, 1, 0))
    np.testing.assert_array_equal(a, c)
    assert (a != b).mean() > 0.1


def test_noise_against_the_formula():
    from bigunet.scenes.noise import unit

    got = value_noise(37, 60, 11, 42, 10, 5)
    for y, x in [(37, 11), (45, 30), (59, 41)]:
        (j, ty), (i, tx) = divmod(y, 10), divmod(x, 10)
        wy, wx = (3 * t * t - 2 * t**3 for t in ((ty + 0.5) / 10, (tx + 0.5) / 10))
        corner = [[float(unit(5, j + a, i + b)[0]) for b in (0, 1)] for a in (0, 1)]
        want = (1 - wy) * (corner[0][0] * (1 - wx) + corner[0][1] * wx) + wy * (
            corner[1][0] * (1 - wx) + corner[1][1] * wx
        )
        assert got[y - 37, x - 11] == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(("shape", "seed"), [((0, 5), 0), ((5,), 0), ((5, 5, 3), 0), ((5, 5), -1)])
def test_bad_arguments(shape, seed):
    with pytest.raises(SceneError, match=r"synthetic scene|seed"):
        synthetic(shape, seed)


@pytest.mark.parametrize("format", ["zarr", "geotiff"])
def test_written_and_read_back(tmp_path, format):
    scene = synthetic((300, 430), seed=2)
    block = 128 if format == "zarr" else 512
    path = write_scene(scene, tmp_path / "s.zarr", format=format, block=block)
    image, labels = (path, path) if format == "zarr" else (path / "image.tif", path / "labels.tif")
    back = pair(open_scene(image), open_labels(labels))
    check_classes(back.labels, 5)
    assert back.classes == SYNTHETIC_CLASSES
    assert back.image.dtype == np.uint8
    np.testing.assert_array_equal(back.image.values, scene.image.values)
    np.testing.assert_array_equal(back.labels.values, scene.labels.values)
    np.testing.assert_array_equal(back.image.x, scene.image.x)
    with pytest.raises(ValueError, match="new path"):
        write_scene(scene, path, format=format)


def test_fast_enough():
    scene = synthetic((4096, 4096))
    read_block(scene.image, 0, 64, 0, 64)
    begin = time.process_time()
    read_block(scene.image, 1000, 2024, 1000, 2024)
    seconds = time.process_time() - begin
    assert 1024**2 / seconds > 1e6  # 5 to 20 million a second on an idle core; other work may run
