"""What a pipelined step refuses, before work; and ranks that die in the middle of one."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import pytest
import torch
from pipeline_ranks import (
    SHAPE,
    data,
    die,
    fitted_plan,
    network,
    on_ranks,
    plan_of,
    scene_pair,
    tiled_plan,
)

from bigunet.errors import LaunchError, PlanError, SceneError, SpecError
from bigunet.launch import launch
from bigunet.losses import Objective
from bigunet.pipeline import Pipeline, train_plan
from bigunet.plan import Plan
from bigunet.spec import TrainSpec

OBJECTIVE = Objective(3)


def pipeline(plan: Plan | None = None, engine: str = "reference", **options: object) -> Pipeline:
    plan = plan or plan_of("plain", (9,))
    return Pipeline(plan, network(plan.spec), OBJECTIVE, engine=engine, **options)


@pytest.mark.parametrize("engine", ["reference", "fairscale_pipe"])
def test_images_that_are_not_the_plans(engine: str) -> None:
    one = pipeline(engine=engine)
    x, labels = data()
    for change, rule in (
        ((x[:3], labels[:3]), r"4 micro-batches of 1.*got \(3, 2, 14, 16\)"),
        ((x[..., :12], labels), "plan's shape"),
        ((x, labels[:, 1:]), "plan's shape"),
        ((x.float(), labels), "float64 of the weights; got torch.float32"),
        ((x, labels.int()), "int64; got torch.int32"),
        ((None, labels), "first stage is given the images"),
        ((x, None), "last stage is given the labels"),
    ):
        with pytest.raises(PlanError, match=rule):
            one.step_images(*change)
    with pytest.raises(SceneError, match="0 to 2"):
        one.step_images(x, labels + 1)
    with pytest.raises(SceneError, match="labelled"):
        one.step_images(x, torch.full_like(labels, 255))
    assert all(p.grad is None for p in one.named_parameters().values())


def test_a_batch_that_micro_batches_do_not_divide() -> None:
    with pytest.raises(PlanError, match="3 must divide the batch, 4"):
        plan_of("plain", (9,), micro_batches=3)


def test_a_plan_of_another_network() -> None:
    plan = plan_of("plain", (9,))
    with pytest.raises(PlanError, match=r"channels=4 \(planned 3\)"):
        Pipeline(plan, network(plan.spec.replace(channels=4)), OBJECTIVE, engine="reference")


def test_an_unknown_engine() -> None:
    with pytest.raises(PlanError, match="fairscale_pipe"):
        pipeline(engine="gpipe")


def test_losses_of_two_passes() -> None:
    plan = plan_of("plain", (9,))
    with pytest.raises(SpecError, match="cross_entropy"):
        Pipeline(plan, network(plan.spec), Objective(3, "dice"), engine="reference")


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("bf16-autocast", torch.float64)]
)
def test_weights_of_the_wrong_type(precision: str, dtype: torch.dtype) -> None:
    plan = plan_of("plain", (9,), train=TrainSpec(precision=precision))
    with pytest.raises(SpecError, match=precision):
        Pipeline(plan, network(plan.spec, dtype), OBJECTIVE, engine="reference")


def test_what_distributed_does_not_run() -> None:
    with pytest.raises(PlanError, match="fairscale_pipe"):
        pipeline(plan_of("plain", (9,), placement="folded"), "distributed")
    with pytest.raises(PlanError, match="skips=hop"):
        pipeline(plan_of("plain", (4, 9, 13), skips="direct"), "distributed")
    with pytest.raises(PlanError, match="gpipe"):
        pipeline(plan_of("plain", (4, 9, 13), micro_batches=2, schedule="1f1b"), "distributed")
    with pytest.raises(LaunchError, match="2 ranks"):
        pipeline(engine="distributed")


def test_what_fairscale_does_not_run() -> None:
    with pytest.raises(PlanError, match="distributed"):
        pipeline(plan_of("plain", (9,), schedule="1f1b"), "fairscale_pipe")
    with pytest.raises(PlanError, match="tiles=1"):
        pipeline(plan_of("plain", (9,), tiles=2), "fairscale_pipe")
    with pytest.raises(PlanError, match="2 devices"):
        pipeline(engine="fairscale_pipe", devices=["cpu"])


def test_fairscale_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fairscale.nn", None)
    with pytest.raises(PlanError, match=r"pip install fairscale==0\.4\.13.*distributed"):
        pipeline(engine="fairscale_pipe")


def test_training_refuses_before_it_writes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    pair, plan = scene_pair(), fitted_plan()
    bad = [
        (replace(plan, scene_shape=(99, 99)), PlanError, "scene of 99 x 99"),
        (replace(plan, shape_BCHW=(4, 2, 44, 40)), PlanError, "40 x 40"),
        (fitted_plan(freeze_norm=False), SpecError, "frozen"),
        (fitted_plan(loss="dice"), SpecError, "cross_entropy"),
    ]
    for wrong, error, text in bad:
        with pytest.raises(error, match=text):
            train_plan(wrong, pair, tmp_path / "out", engine="reference", progress=False)
    with pytest.raises(PlanError, match="Start 2 ranks"):
        train_plan(plan, pair, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_tiles_of_another_size() -> None:
    plan = tiled_plan("plain", (9,), batch=4)
    assert plan.shape_BCHW[2:] != SHAPE[2:]
    with pytest.raises(PlanError, match="plan's shape"):
        pipeline(plan).step_images(*data())


def test_a_fault_of_one_rank_ends_the_step_on_all() -> None:
    """Nobody is left waiting, and the next step runs."""
    for rank, texts in enumerate(on_ranks(2)["bad"]):
        weights, shape, labels, ranks, after = texts
        assert ("on another rank" if rank == 0 else "torch.float32") in weights
        assert ("plan's shape" if rank == 0 else "1 other ranks") in shape
        assert "labels are 0 to 2" in labels
        assert "Start 4 ranks, or plan for 2" in ranks
        assert after == "ok"


@pytest.mark.parametrize(
    ("how", "cause"),
    [("raises", "the layer that failed on purpose"), ("killed", "rank 0.*lost a neighbour")],
)
def test_a_rank_that_dies_ends_the_others(how: str, cause: str) -> None:
    began = time.monotonic()
    with pytest.raises(LaunchError, match=cause):
        launch(die, (how,), ranks=2, threads_per_rank=1, progress=False, timeout_seconds=100)
    assert time.monotonic() - began < 100
