"""Why no cuts fit the memory: which stage is over, by how much, and how many stages it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from bigunet.cuts import CutProblem, peak_bytes
from bigunet.errors import MemoryBudgetError, PlanError, fail
from bigunet.plan import Placement, devices_of
from bigunet.search import best_cuts, fits_memory

__all__ = ["explain_misfit"]

_MOST_STAGES = 256


def explain_misfit(problem: CutProblem, placement: Placement) -> NoReturn:
    """Raise the error of a problem without allowed cuts: `MemoryBudgetError`, or `PlanError`."""
    if problem.stage_bytes is None:
        fail(
            PlanError,
            rule="the stages can be placed as asked",
            got=f"{problem.num_stages} stages of {problem.num_rows} layers, {placement}",
            remedy="Ask for fewer stages, or place them straight.",
        )
    limit = problem.memory_limit
    low, high = limit, float(peak_bytes(problem, _first_cuts(problem)).max())
    nearest = best_cuts(_with(problem, high), max_labels=300)
    for _ in range(20):
        middle = (low + high) / 2
        found = best_cuts(_with(problem, middle), max_labels=300)
        if found is None:
            low = middle
        else:
            nearest, high = found, middle
        if high - low < 1e-3 * limit:
            break
    cuts = np.array([nearest.cuts]) if nearest is not None else _first_cuts(problem)
    peaks = peak_bytes(problem, cuts)[0]
    device = int(peaks.argmax())
    stages = [s for s, d in enumerate(problem.devices) if d == device]
    more = _least_stages(problem, placement)
    gib = 2.0**30
    which = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
    fail(
        MemoryBudgetError,
        rule=f"each device holds its stages in {limit / gib:.3f} GiB",
        got=f"at the most even cuts {which} on device {device} needs {peaks[device] / gib:.3f} "
        f"GiB, {(peaks[device] - limit) / gib:.3f} GiB too many",
        remedy=f"The least number of stages that fits is {more}."
        if more
        else "No number of stages fits: use a smaller micro-batch or tile, or recompute.",
    )


def _with(problem: CutProblem, limit: float, devices: tuple[int, ...] | None = None) -> CutProblem:
    return replace(problem, memory_limit=limit, devices=devices or problem.devices)


def _first_cuts(problem: CutProblem) -> NDArray[np.int64]:
    """Cuts that are allowed, the first stages as short as can be."""
    cuts = np.array([[*range(problem.num_stages), problem.num_rows]])
    if not problem.keep_skips:
        return cuts
    found = best_cuts(_with(problem, np.inf), max_labels=300)
    return cuts if found is None else np.array([found.cuts])


def _least_stages(problem: CutProblem, placement: Placement) -> int | None:
    """The least number of stages, above the problem's, whose best cuts fit."""
    old = problem.num_stages
    step = {"straight": 1, "folded": 2, "interleaved": problem.num_devices}[placement]
    for stages in range(old + step, min(problem.num_rows, _MOST_STAGES) + 1, step):
        if placement == "folded" and stages > old + 16:
            return None
        devices = devices_of(placement, stages, problem.num_devices)
        if fits_memory(_with(problem, problem.memory_limit, devices)):
            return stages
    return None
