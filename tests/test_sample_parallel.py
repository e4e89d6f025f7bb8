"""Exact steps: tiles against the whole image in float64, every named gradient."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from rank_work import (
    CASES,
    everyone,
    exactness,
    gradients,
    network,
    scene,
    whole_gradients,
    worst,
)
from torch.nn import functional as F

from bigunet.augment import SYMMETRIES, apply, turned_tile
from bigunet.errors import ExactnessError, SceneError, ShapeError, SpecError
from bigunet.launch import launch
from bigunet.losses import Objective
from bigunet.sample_parallel import deal_tiles, exact_step, narrowed, step
from bigunet.tile_reader import Sample, TileReader
from bigunet.tiles import tile_image

TOLERANCE = 1e-10


@pytest.mark.parametrize(
    ("recompute", "batch"), list(itertools.product(("none", "block", "stage"), (1, 3)))
)
def test_one_rank_equals_the_whole_image(recompute: str, batch: int) -> None:
    image, labels = scene()
    model = network(norm="batch", dropout=0.2)
    loss, expected = whole_gradients(model, image, labels, loss="cross_entropy+dice")
    result = exact_step(
        model,
        image,
        labels,
        tile_image((77, 58), (16, 24), model.spec),
        loss="cross_entropy+dice",
        recompute=recompute,  # type: ignore[arg-type]
        batch=batch,
    )
    assert worst(gradients(model), expected) <= TOLERANCE
    assert abs(result.loss - loss) <= 1e-12
    assert result.pixels == (labels != 255).sum()
    assert result.pixels_of_class == tuple(np.bincount(labels.ravel(), minlength=256)[:4])


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_equal_the_whole_image(num_ranks: int) -> None:
    """Real processes and gloo; unequal tiles, ignored pixels, ranks without a labelled tile."""
    results = launch(everyone, ("exactness",), ranks=num_ranks, threads_per_rank=1, progress=False)
    assert len(results) == num_ranks
    for name in CASES:
        for difference, loss_difference, _ in (result[name] for result in results):
            assert difference <= TOLERANCE, name
            assert loss_difference <= 1e-12, name
    shares = [result["plain"][2] for result in results]
    assert min(shares) > 0
    empty = [result["two tiles, one of them empty"][2] for result in results]
    assert sorted(empty) == [0] * (num_ranks - 1) + [1]


def test_one_rank_runs_the_same_cases() -> None:
    for name, (difference, loss_difference, _) in exactness().items():
        assert difference <= TOLERANCE, name
        assert loss_difference <= 1e-12, name


def test_a_halo_one_stride_smaller_is_seen() -> None:
    image, labels = scene()
    model = network()
    spec = model.spec
    _, expected = whole_gradients(model, image, labels)
    tiles = tile_image((77, 58), 16, spec, halo=spec.halo_aligned - spec.stride)
    exact_step(model, image, labels, tiles)
    assert worst(gradients(model), expected) > 1e-4


@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_turned_tiles_equal_the_turned_image(symmetry: int) -> None:
    image, labels = scene((45, 58))
    model = network()
    padded = np.pad(image, ((0, 0), (0, 3), (0, 2)), mode="edge")
    truth = np.pad(labels, ((0, 3), (0, 2)), constant_values=255)
    _, expected = whole_gradients(
        model, apply(padded, symmetry).copy(), apply(truth, symmetry).copy()
    )
    cores = [tile.core for tile in tile_image((45, 58), 24, model.spec)]
    samples = [Sample(turned_tile(c, (45, 58), model.spec, symmetry), symmetry) for c in cores]
    step(model, TileReader.of(model.spec, image, labels), samples, Objective(4))
    assert worst(gradients(model), expected) <= TOLERANCE


def test_some_tiles_give_their_own_mean() -> None:
    """A set that is not the whole image: the mean over its labelled pixels."""
    image, labels = scene()
    model = network()
    tiles = tile_image((77, 58), 16, model.spec)[5:9]
    inside = np.full_like(labels, 255)
    for tile in tiles:
        inside[tile.write.slices] = labels[tile.write.slices]
    _, expected = whole_gradients(model, image, inside)
    exact_step(model, image, labels, tiles)
    assert worst(gradients(model), expected) <= TOLERANCE


def test_earlier_gradients_are_replaced() -> None:
    image, labels = scene()
    model = network()
    tiles = tile_image((77, 58), 32, model.spec)
    exact_step(model, image, labels, tiles)
    once = gradients(model)
    exact_step(model, image, labels, tiles)
    assert worst(gradients(model), once) == 0


@pytest.mark.parametrize(
    ("norm", "precision", "tolerance"),
    [
        ("none", "fp32", 1e-5),
        ("batch", "fp32", 1e-5),
        ("none", "bf16-autocast", 0.05),
        ("none", "bf16", 0.05),
        ("batch", "bf16", 0.05),
    ],
)
def test_lower_precisions_come_near(norm: str, precision: str, tolerance: float) -> None:
    image, labels = scene()
    model = network(norm=norm, channels=8)
    _, expected = whole_gradients(model, image, labels)
    model = model.float()
    worker = narrowed(model) if precision == "bf16" else model
    samples = [Sample(tile) for tile in tile_image((77, 58), 16, model.spec)]
    reader = TileReader.of(model.spec, image.astype(np.float32), labels)
    step(worker, reader, samples, Objective(4), precision=precision, into=model)  # type: ignore[arg-type]
    got = {name: gradient.double() for name, gradient in gradients(model).items()}
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    norms = torch.stack([e.norm() for e in expected.values()])
    apart = torch.stack([(got[n] - e).norm() for n, e in expected.items()])
    assert (apart.norm() / norms.norm()).item() <= tolerance


def test_bf16_sums_do_not_depend_on_the_number_of_tiles() -> None:
    """160 equal tiles: sums in bf16 would stop growing; those in fp32 do not."""
    image = np.tile(
        np.random.default_rng(0).standard_normal((3, 4, 4)).astype(np.float32), (1, 40, 4)
    )
    labels = np.zeros((160, 16), np.uint8)
    model = narrowed(network(levels=1, kernel=1).float())
    grads = []
    for side in (4, 16):
        tiles = tile_image((160, 16), side, model.spec)
        exact_step(model, image, labels, tiles, precision="bf16")
        grads.append(torch.cat([p.grad.float().flatten() for p in model.parameters()]))
    assert ((grads[0] - grads[1]).norm() / grads[1].norm()).item() < 0.02


def test_tiles_are_dealt_evenly_and_alike() -> None:
    model = network()
    tiles = tile_image((500, 390), 48, model.spec)
    for num_ranks in (1, 2, 3, 7, 200):
        dealt = deal_tiles(tiles, num_ranks)
        assert sorted(i for share in dealt for i in share) == list(range(len(tiles)))
        loads = [sum(tiles[i].read.area for i in share) for share in dealt]
        best = max(sum(loads) / num_ranks, max(t.read.area for t in tiles))
        assert max(loads) <= 4 / 3 * best
        assert dealt == deal_tiles(tiles, num_ranks)


@pytest.mark.parametrize(
    ("options", "training", "reason"),
    [
        ({"norm": "instance"}, False, 'norm="instance" averages'),
        ({"norm": "group", "groups": 2}, False, 'norm="group" averages'),
        ({"norm": "batch"}, True, "batch norm in training mode"),
        ({"dropout": 0.1}, True, "dropout draws a mask"),
    ],
)
def test_what_is_not_exact_is_refused(options: dict[str, Any], training: bool, reason: str) -> None:
    image, labels = scene()
    model = network(**options).train(training)
    tiles = tile_image((77, 58), 32, model.spec)
    with pytest.raises(ExactnessError, match=reason) as caught:
        exact_step(model, image, labels, tiles)
    assert "exact=False" in str(caught.value)
    assert exact_step(model, image, labels, tiles, exact=False).pixels > 0


def test_bad_input() -> None:
    image, labels = scene()
    model = network()
    tiles = tile_image((77, 58), 16, model.spec)
    with pytest.raises(SceneError, match="at least one pixel"):
        exact_step(model, image, np.full_like(labels, 255), tiles)
    with pytest.raises(SceneError, match="labels are 0 to 3, or 255"):
        exact_step(model, image, np.where(labels == 0, 9, labels), tiles)
    with pytest.raises(SceneError, match="as many bands; got 13"):
        exact_step(model, np.zeros((13, 77, 58)), labels, tiles)
    with pytest.raises(SpecError, match='bf16" is for bf16 weights'):
        exact_step(model, image, labels, tiles, precision="bf16")
    with pytest.raises(SpecError, match="class_weights"):
        exact_step(model, image, labels, tiles, class_weights=(1.0,))
    with pytest.raises(ShapeError, match="multiples of the stride 4"):
        tile_image((77, 58), 18, model.spec)
    with pytest.raises(SceneError):
        exact_step(model, image[:, :70], labels[:70], tiles)


def test_nan_pixels_do_not_reach_the_gradient() -> None:
    image, labels = scene()
    image[1, 40, 30] = np.nan
    model = network()
    exact_step(model, image, labels, tile_image((77, 58), 16, model.spec))
    filled, without = image.copy(), labels.copy()
    filled[:, 40, 30], without[40, 30] = 0.0, 255
    got = gradients(model)
    _, expected = whole_gradients(model, filled, without)
    assert worst(got, expected) <= TOLERANCE


def test_statistics_are_learnt_once_where_dice_needs_two_passes() -> None:
    image, labels = scene()
    means = []
    for loss in ("cross_entropy", "dice"):
        model = network(norm="batch").train()
        tiles = tile_image((77, 58), 32, model.spec)
        exact_step(model, image, labels, tiles, loss=loss, exact=False)  # type: ignore[arg-type]
        norm = next(m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d))
        means.append(norm.running_mean.clone())
        assert norm.momentum == 0.1
    assert torch.equal(*means)


def test_the_reference_is_torch_itself() -> None:
    """`whole_gradients` against a plain loop, so that both cannot share a mistake."""
    image, labels = scene()
    model = network()
    loss, expected = whole_gradients(model, image, labels)
    model.zero_grad()
    logits = model(torch.from_numpy(image)[None])[0]
    log_probability = F.log_softmax(logits, 0)
    total, count = logits.new_zeros(()), 0
    for y, x in np.argwhere(labels != 255):
        total, count = total - log_probability[labels[y, x], y, x], count + 1
    (total / count).backward()
    assert abs((total / count).item() - loss) < 1e-12
    assert worst(gradients(model), expected) < 1e-12
