"""Plans tried on this machine: gradients against the whole image and the plain network, a run."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from bigunet.errors import MemoryBudgetError, PlanError
from bigunet.exactness import compare_gradients, synthetic_gradients
from bigunet.launch import launch
from bigunet.layers import layer_table
from bigunet.model import UNet
from bigunet.pipeline import read_shape
from bigunet.plan import Plan, devices_of
from bigunet.rehearsal import plan_gradients, run_here
from bigunet.scenes import SYNTHETIC_CLASSES, synthetic
from bigunet.spec import TrainSpec, UNetSpec

SPEC = UNetSpec(levels=3, convs=1, channels=3, classes=len(SYNTHETIC_CLASSES))
SCENE = (77, 45)


def plan_of(shape: tuple[int, ...], cuts: tuple[int, ...], **more: Any) -> Plan:
    names = [row.name for row in layer_table(SPEC, shape)]  # type: ignore[arg-type]
    stages = tuple((names[a], names[b - 1]) for a, b in pairwise((0, *cuts, len(names))))
    placement = more.pop("placement", "straight")
    values: dict[str, Any] = {"train": TrainSpec(tile=16), "micro_batches": shape[0]} | more
    return Plan(
        spec=SPEC, shape_BCHW=shape, stages=stages,  # type: ignore[arg-type]
        devices=devices_of(placement, len(stages)), **values,
    )  # fmt: skip


def tiled_plan(**more: Any) -> Plan:
    read = read_shape(SCENE, 16, SPEC)
    return plan_of((4, 3, *read), (9,), scene_shape=SCENE, **more)


def test_tiles_of_a_plan_have_the_gradient_of_the_whole_scene() -> None:
    whole = synthetic_gradients(SPEC, SCENE, (80, 48), seed=3)
    found = plan_gradients(tiled_plan(), engine="reference", seed=3)
    assert float(compare_gradients(whole, found).relative_difference.max()) < 1e-10
    other = plan_gradients(tiled_plan(), engine="reference", seed=4)
    assert float(compare_gradients(whole, other).relative_difference.max()) > 1e-3


def test_images_of_a_plan_have_the_gradient_of_the_plain_network() -> None:
    found = plan_gradients(plan_of((3, 3, 16, 20), (5, 9)), engine="reference", seed=2)
    torch.manual_seed(2)
    model = UNet(SPEC).double()
    scenes = [synthetic((16, 20), 2 + i) for i in range(3)]
    x = torch.from_numpy(np.stack([s.image.values for s in scenes])).double() / 255
    labels = np.stack([s.labels.values for s in scenes]).astype(np.int64)
    for i in range(3):
        labels[i][np.random.default_rng(2 + i).random((16, 20)) < 0.1] = scenes[i].ignore
    F.cross_entropy(
        model(x), torch.from_numpy(labels), ignore_index=scenes[0].ignore
    ).backward()  # fmt: skip
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(found[name], parameter.grad.numpy(), rtol=1e-9, atol=1e-13)


def test_ranks_bring_all_gradients_back() -> None:
    plan = tiled_plan(schedule="1f1b")
    one = plan_gradients(plan, engine="reference")
    two = launch(
        plan_gradients, (plan.to_yaml(),), ranks=2, threads_per_rank=1, progress=False,
        timeout_seconds=400,
    )  # fmt: skip
    assert list(two) == [name for name, _ in UNet(SPEC).named_parameters()]
    assert float(compare_gradients(one, two).relative_difference.max()) < 1e-10


def test_a_plan_runs_here_and_is_timed() -> None:
    plan = plan_of((4, 3, 32, 32), (9,), schedule="1f1b")
    found = run_here(plan, rounds=2, timeout_seconds=400)
    for kind in ("forward", "backward"):
        some = found.isel(action=(found["kind"] == kind).values)
        pairs = set(zip(some["stage"].values.tolist(), some["micro_batch"].values.tolist(),
                        strict=True))  # fmt: skip
        assert pairs == {(s, m) for s in range(2) for m in range(4)}
    assert (found["end"] > found["start"]).all()
    assert 0 < float(found["end"].max()) <= found.attrs["step_seconds"]


def test_what_cannot_run_here_is_refused_before_ranks_start() -> None:
    folded = plan_of((4, 3, 32, 32), (5, 9, 12), placement="folded")
    with pytest.raises(PlanError, match="straight"):
        run_here(folded)
    with pytest.raises(MemoryBudgetError, match="GiB"):
        run_here(plan_of((4, 3, 2**16, 2**16), (9,)))
