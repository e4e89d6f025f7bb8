"""The best cuts against every possible cut, timed by the schedule itself."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from bigunet.cost import RowCosts, Skip
from bigunet.cuts import CutProblem, durations, peak_bytes, skips_stay, step_seconds
from bigunet.machines import Link
from bigunet.plan import devices_of
from bigunet.search import best_cuts, fits_memory
from bigunet.timeline import run, topological

CASES = 480
BATCHES = 8


class SumMemory:
    """Bytes of a stage: its weights, and what it keeps of each micro-batch in flight."""

    def __init__(self, weights: Any, kept: Any) -> None:
        self.weights = np.concatenate(([0], np.cumsum(weights)))
        self.kept = np.concatenate(([0], np.cumsum(kept)))

    def __call__(self, first: Any, stop: Any, *, in_flight: int, stage: int) -> Any:
        fixed = self.weights[stop] - self.weights[first]
        return fixed + in_flight * (self.kept[stop] - self.kept[first])


def random_problem(rng: np.random.Generator) -> CutProblem:
    """Up to 14 rows and 5 stages (6 of two devices), any schedule, links, skips and memory."""
    placement = str(rng.choice(["straight", "straight", "folded", "interleaved"]))
    if placement == "straight":
        stages = int(rng.integers(1, 6))
        devices = devices_of("straight", stages)
    elif placement == "folded":
        stages = int(rng.choice([2, 4]))
        devices = devices_of("folded", stages)
    else:
        stages = 4
        devices = devices_of("interleaved", stages, 2)
    num = int(rng.integers(max(4, stages), 15))
    count = int(rng.choice([2, 4, 8] if placement == "interleaved" else [1, 2, 3, 8]))
    nested = int(rng.integers(0, min(3, num // 4) + 1))
    ends = sorted(rng.choice(num, 2 * nested, replace=False).tolist())
    skips = tuple(Skip(ends[i], ends[-1 - i], int(rng.integers(1, 100))) for i in range(nested))
    rate, latency = float(rng.choice([3, 30, 300, np.inf])), float(rng.choice([0, 0.2]))
    link = Link("l", rate, latency, by_processors=bool(rng.integers(2)))
    free = Link("same", np.inf)
    weights, kept = rng.integers(1, 20, num), rng.integers(1, 20, num)
    share = (weights.sum() + kept.sum() * min(count, stages)) / (max(devices) + 1)
    return CutProblem(
        costs=RowCosts(rng.uniform(0.1, 2, num) ** rng.integers(1, 4), rng.uniform(0.1, 4, num)),
        output_bytes=rng.integers(1, 50, num),
        skips=skips,
        devices=devices,
        micro_batches=count,
        schedule=str(rng.choice(["gpipe", "1f1b"])),  # type: ignore[arg-type]
        link=lambda a, b: link if a != b else free,
        recompute=str(rng.choice(["none", "block", "stage", "except_last"])),  # type: ignore
        direct_skips=bool(rng.integers(2)),
        keep_skips=placement == "folded",
        stage_bytes=SumMemory(weights, kept),
        memory_limit=float(rng.choice([share * 1.2, share * 1.6, 1e9])),
    )


def every_cut(problem: CutProblem) -> np.ndarray:
    num = problem.num_rows
    inner = combinations(range(1, num), problem.num_stages - 1)
    return np.array([(0, *cuts, num) for cuts in inner])


@pytest.mark.parametrize("part", range(BATCHES))
def test_best_cuts_equal_brute_force(part: int) -> None:
    """Step times over all cuts come from the simulated schedule, not from a closed form."""
    rng = np.random.default_rng(part)
    feasible = 0
    for _ in range(CASES // BATCHES):
        problem = random_problem(rng)
        cuts = every_cut(problem)
        allowed = (peak_bytes(problem, cuts) <= problem.memory_limit).all(axis=1)
        if problem.keep_skips:
            allowed &= skips_stay(problem, cuts)
        found = best_cuts(problem)
        if not allowed.any():
            assert found is None
            assert not fits_memory(problem)
            continue
        feasible += 1
        assert found is not None
        assert fits_memory(problem)
        times = run(topological(problem.lists), durations(problem, cuts[allowed]))
        assert found.seconds == pytest.approx(times.min(), rel=1e-10)
        assert found.proved
        assert found.bound_seconds <= times.min() * (1 + 1e-10)
        assert (cuts[allowed] == found.cuts).all(axis=1).any()
    assert feasible >= CASES // BATCHES // 2


def test_closed_form_is_the_simulated_step() -> None:
    rng = np.random.default_rng(99)
    exact = 0
    while exact < 40:
        problem = random_problem(rng)
        if not problem.exact_closed_form:
            continue
        exact += 1
        cuts = every_cut(problem)
        times = run(topological(problem.lists), durations(problem, cuts))
        np.testing.assert_allclose(step_seconds(problem, cuts), times, rtol=1e-12)


def test_a_stopped_search_says_so_and_its_bound_holds() -> None:
    rng = np.random.default_rng(3)
    unproved = 0
    for _ in range(60):
        problem = random_problem(rng)
        best = best_cuts(problem)
        hasty = best_cuts(problem, max_labels=2)
        if best is None or hasty is None:
            continue
        assert hasty.seconds >= best.seconds * (1 - 1e-10)
        assert hasty.bound_seconds <= best.seconds * (1 + 1e-10)
        unproved += not hasty.proved
        if hasty.proved:
            assert hasty.seconds == pytest.approx(best.seconds, rel=1e-10)
    assert unproved > 5


def test_more_stages_than_rows() -> None:
    rng = np.random.default_rng(0)
    problem = random_problem(rng)
    while problem.num_stages < 3 or problem.keep_skips:
        problem = random_problem(rng)
    short = CutProblem(
        costs=RowCosts(np.ones(2), np.ones(2)),
        output_bytes=np.ones(2, dtype=np.int64),
        skips=(),
        devices=problem.devices,
        micro_batches=problem.micro_batches,
        schedule=problem.schedule,
        link=problem.link,
    )
    assert best_cuts(short) is None
    assert not fits_memory(short)
