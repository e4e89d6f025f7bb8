"""Plans from networks: best cuts, choices made when asked, what is said when nothing fits."""

from __future__ import annotations

import re
import time
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from bigunet.cost import RooflineCost, RowCosts, Skip
from bigunet.cuts import CutProblem, peak_bytes, step_seconds
from bigunet.errors import MemoryBudgetError, PlanError
from bigunet.infeasible import explain_misfit
from bigunet.layers import layer_table
from bigunet.machines import machine
from bigunet.planner import (
    Planned,
    balanced_plan,
    cut_problem,
    find_plan,
    plan_problem,
    plan_stages,
)
from bigunet.rules import check_plan
from bigunet.search import best_cuts
from bigunet.simulate import simulate
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.stage_memory import row_memory

SPEC = UNetSpec(levels=3, channels=16)
TABLE = layer_table(SPEC, (8, 3, 64, 64))
SUMMIT = machine("summit")
COST = RooflineCost(SUMMIT.processor)


def found(**changes: Any) -> Planned:
    values: dict[str, Any] = {
        "spec": SPEC,
        "train": TrainSpec(),
        "machine": SUMMIT,
        "stages": 3,
        "micro_batches": 4,
    }
    values |= changes
    return find_plan(values.pop("table", TABLE), values.pop("cost", COST), **values)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("skips", ["hop", "direct"])
def test_a_network_s_best_plan_equals_brute_force(schedule: str, skips: str) -> None:
    best = found(schedule=schedule, skips=skips)
    problem = plan_problem(best.plan, COST, SUMMIT)
    inner = combinations(range(1, len(TABLE)), 2)
    every = np.array([(0, *cuts, len(TABLE)) for cuts in inner])
    assert best.seconds == pytest.approx(step_seconds(problem, every).min(), rel=1e-10)
    assert best.proved
    result = simulate(best.plan, COST, SUMMIT)
    assert result.attrs["step_seconds"] == pytest.approx(best.seconds, rel=1e-10)
    check_plan(best.plan)


def test_plan_stages_is_the_plan_of_find_plan() -> None:
    plan = plan_stages(
        TABLE, COST, spec=SPEC, train=TrainSpec(), machine=SUMMIT, stages=3, micro_batches=4
    )
    assert plan == found().plan
    assert plan.machine == "summit"
    assert plan.shape_BCHW == (8, 3, 64, 64)


def test_micro_batches_are_chosen_when_asked() -> None:
    best = found(micro_batches=None)
    alone = {m: found(micro_batches=m).seconds for m in (1, 2, 4, 8)}
    assert best.seconds == min(alone.values())
    assert alone[best.plan.micro_batches] == best.seconds


def test_memory_is_a_hard_limit() -> None:
    memory = row_memory(SPEC)
    loose = found(memory=memory)
    limit = 0.95 * max(loose.peak_bytes)
    tight = found(memory=memory, memory_limit=limit)
    assert max(tight.peak_bytes) <= limit < max(loose.peak_bytes)
    assert tight.seconds >= loose.seconds
    problem = cut_problem(
        TABLE, COST, train=TrainSpec(), devices=(0, 1, 2), micro_batches=4, schedule="gpipe",
        machine=SUMMIT, memory=memory, memory_limit=limit,
    )  # fmt: skip
    every = np.array([(0, *c, len(TABLE)) for c in combinations(range(1, len(TABLE)), 2)])
    every = every[(peak_bytes(problem, every) <= limit).all(axis=1)]
    assert tight.seconds == pytest.approx(step_seconds(problem, every).min(), rel=1e-10)


def test_recomputation_is_chosen_only_where_memory_asks_for_it() -> None:
    memory = row_memory(SPEC)
    free = found(memory=memory, recompute="auto")
    assert free.plan.train.recompute == "none"
    limit = 0.7 * max(free.peak_bytes)
    with pytest.raises(MemoryBudgetError):
        found(memory=memory, memory_limit=limit)
    forced = found(memory=memory, memory_limit=limit, recompute="auto")
    assert forced.plan.train.recompute != "none"
    assert forced.seconds > free.seconds


def test_nothing_fits_says_who_is_over_and_what_would_fit() -> None:
    memory = row_memory(SPEC)
    limit = 0.7 * max(found(memory=memory).peak_bytes)
    with pytest.raises(MemoryBudgetError) as caught:
        found(memory=memory, memory_limit=limit)
    text = str(caught.value)
    over = re.search(r"stage (\d) on device \d needs ([\d.]+) GiB, ([\d.]+) GiB too many", text)
    assert over is not None
    assert float(over[2]) - float(over[3]) == pytest.approx(limit / 2**30, abs=2e-3)
    least = int(re.search(r"stages that fits is (\d+)", text)[1])  # type: ignore[index]
    assert max(found(memory=memory, memory_limit=limit, stages=least).peak_bytes) <= limit
    for stages in range(3, least):
        with pytest.raises(MemoryBudgetError):
            found(memory=memory, memory_limit=limit, stages=stages)
    with pytest.raises(MemoryBudgetError, match="No number of stages fits"):
        found(memory=memory, memory_limit=1000)


def test_an_exact_check_lowers_the_estimate_s_limit() -> None:
    memory = row_memory(SPEC)
    loose = found(memory=memory)
    limit = max(loose.peak_bytes)

    def twice_at_the_front(plan: Any) -> list[float]:
        problem = plan_problem(plan, COST, SUMMIT, memory)
        peaks = peak_bytes(problem, np.array([plan.cuts]))[0]
        return [1.1 * peaks[0], *peaks[1:]]

    best = found(memory=memory, memory_limit=limit, check=twice_at_the_front)
    assert max(best.peak_bytes) <= limit
    with pytest.raises(MemoryBudgetError, match="when checked"):
        found(memory=memory, memory_limit=limit, check=lambda plan: [2 * limit])


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"stages": len(TABLE) + 1}, PlanError, "number of stages is 1 to"),
        ({"stages": 0}, PlanError, "number of stages is 1 to"),
        ({"micro_batches": 3}, PlanError, "Use one of 1, 2, 4, 8"),
        ({"placement": "folded"}, PlanError, "even number"),
        ({"placement": "interleaved"}, PlanError, "deals 3 stages"),
        (
            {
                "placement": "interleaved",
                "stages": 6,
                "num_devices": 3,
                "schedule": "1f1b",
                "micro_batches": None,
            },
            PlanError,
            "groups of 3",
        ),
    ],
)
def test_bad_questions(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        found(**changes)


def test_a_fold_that_cannot_keep_its_skips() -> None:
    """A skip joined in the first row of the second half would need both ends in one stage."""
    problem = CutProblem(
        costs=RowCosts(np.ones(4), np.ones(4)),
        output_bytes=np.ones(4, dtype=np.int64),
        skips=(Skip(0, 1, 1),),
        devices=(0, 1, 1, 0),
        micro_batches=1,
        schedule="gpipe",
        link=SUMMIT.link,
        keep_skips=True,
    )
    assert best_cuts(problem) is None
    with pytest.raises(PlanError, match="placed as asked"):
        explain_misfit(problem, "folded")


def test_balances_are_what_they_say() -> None:
    memory = row_memory(SPEC)
    best = found()
    plans = {
        by: balanced_plan(
            TABLE,
            COST,
            by=by,
            spec=SPEC,
            train=TrainSpec(),
            machine=SUMMIT,
            stages=3,
            micro_batches=4,
            memory=memory,
        )
        for by in ("time", "memory", "parameters", "fairscale")
    }

    def heaviest(plan: Planned, weights: np.ndarray) -> float:
        return float(np.add.reduceat(weights, plan.plan.cuts[:-1]).max())

    problem = plan_problem(best.plan, COST, SUMMIT)
    seconds = problem.costs.forward_seconds + problem.costs.backward_seconds
    parameters = np.array([row.parameters for row in TABLE])
    for plan in plans.values():
        assert heaviest(plans["time"], seconds) <= heaviest(plan, seconds) * (1 + 1e-9)
        assert heaviest(plans["parameters"], parameters) <= heaviest(plan, parameters)
        assert max(plans["memory"].peak_bytes) <= 1.1 * max(plan.peak_bytes)
        assert plan.seconds >= best.seconds * (1 - 1e-10)
    with pytest.raises(PlanError, match="memory model"):
        balanced_plan(
            TABLE, COST, by="memory", spec=SPEC, train=TrainSpec(), machine=SUMMIT, stages=3,
            micro_batches=4,
        )  # fmt: skip


def test_the_published_giant_is_planned_in_time() -> None:
    """torchgpipe's (48, 160), 15.8 billion parameters, 8 stages: under 200 ms of processor time."""
    spec = UNetSpec.torchgpipe(48, 160)
    table = layer_table(spec, (64, 3, 192, 192))
    assert len(table) > 2100
    took = []
    for _ in range(3):
        start = time.process_time()
        best = find_plan(
            table, COST, spec=spec, train=TrainSpec(), machine=SUMMIT, stages=8, micro_batches=16
        )
        took.append(time.process_time() - start)
    assert best.proved
    assert min(took) < 0.2
