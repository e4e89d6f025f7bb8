"""Gradients by tiles and ranks against the whole image on one rank, as notebook 03 shows them."""

from __future__ import annotations

import numpy as np
import pytest

from bigunet.errors import ShapeError
from bigunet.exactness import compare_gradients, synthetic_gradients
from bigunet.launch import launch
from bigunet.scenes import SYNTHETIC_CLASSES
from bigunet.spec import UNetSpec

SPEC = UNetSpec(levels=2, convs=1, channels=4, classes=len(SYNTHETIC_CLASSES))
SHAPE = (70, 90)


def test_unequal_tiles_on_two_ranks_give_the_whole_images_gradient() -> None:
    whole = synthetic_gradients(SPEC, SHAPE, SHAPE)
    tiled = launch(
        synthetic_gradients, (SPEC, SHAPE, 32), ranks=2, threads_per_rank=1, progress=False
    )
    compared = compare_gradients(whole, tiled)
    assert list(compared["parameter"].values) == list(whole)
    assert float(compared.relative_difference.max()) <= 1e-10
    assert float(compared.norm.min()) > 0


def test_a_halo_one_stride_smaller_differs() -> None:
    whole = synthetic_gradients(SPEC, SHAPE, SHAPE)
    short = synthetic_gradients(SPEC, SHAPE, 32, halo=SPEC.halo_aligned - SPEC.stride)
    assert float(compare_gradients(whole, short).relative_difference.max()) > 1e-5


def test_ignored_labels_count() -> None:
    some = synthetic_gradients(SPEC, SHAPE, SHAPE, ignored=0.5)
    none = synthetic_gradients(SPEC, SHAPE, SHAPE, ignored=0.0)
    assert float(compare_gradients(none, some).relative_difference.max()) > 1e-3


def test_comparing_names_both_kinds_of_difference() -> None:
    one = {"a": np.array([3.0, 4.0]), "b": np.zeros(2)}
    other = {"a": np.array([3.0, 4.5]), "b": np.array([0.0, 1.0])}
    compared = compare_gradients(one, other)
    assert compared.relative_difference.values.tolist() == [0.1, np.inf]
    assert compared.norm.values.tolist() == [5.0, 0.0]
    with pytest.raises(ShapeError):
        compare_gradients(one, {"a": one["a"]})
