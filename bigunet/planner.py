"""From a layer table and its costs to a plan: the best one, or one balanced in another way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from bigunet.balance import balance, block_partition
from bigunet.cost import CostModel, activation_bytes, micro_batch_rows, skips_of
from bigunet.cuts import CutProblem, StageBytes, peak_bytes, step_seconds
from bigunet.errors import MemoryBudgetError, PlanError, fail
from bigunet.infeasible import explain_misfit
from bigunet.layers import LayerRow
from bigunet.machines import Machine
from bigunet.plan import Placement, Plan, Schedule, SkipRoute, devices_of
from bigunet.search import best_cuts
from bigunet.spec import Recompute, TrainSpec, UNetSpec

# Searches with ever lower limits, until the checked peaks fit.
_CHECKS = 12

__all__ = [
    "Balance",
    "MemoryModel",
    "PlanCheck",
    "Planned",
    "balanced_plan",
    "cut_problem",
    "find_plan",
    "plan_problem",
    "plan_stages",
]

Balance = Literal["time", "memory", "parameters", "fairscale"]
# Rows of one micro-batch and the training (its recompute) -> the bytes of any stage of them.
# The exact peak bytes of each device of a plan, where `MemoryModel` may be an estimate.
PlanCheck = Callable[[Plan], Sequence[float]]
MemoryModel = Callable[[Sequence[LayerRow], TrainSpec], StageBytes]


@dataclass(frozen=True)
class Planned:
    """A plan with what was found out about it.

    `seconds` is its step time, `bound_seconds` a bound that no cuts can beat (equal to it where
    the search was `proved` complete), `peak_bytes` the peak of each device (empty without a
    memory model).
    """

    plan: Plan
    seconds: float
    bound_seconds: float
    proved: bool
    peak_bytes: tuple[int, ...]


def cut_problem(
    table: Sequence[LayerRow],
    cost: CostModel,
    *,
    train: TrainSpec,
    devices: tuple[int, ...],
    micro_batches: int,
    schedule: Schedule,
    machine: Machine,
    skips: SkipRoute = "hop",
    memory: MemoryModel | None = None,
    memory_limit: float | None = None,
    keep_skips: bool = False,
) -> CutProblem:
    """The problem of cutting `table`, the rows of the whole batch, into `len(devices)` stages."""
    rows = micro_batch_rows(table, micro_batches)
    limit = machine.processor.memory_bytes if memory_limit is None else memory_limit
    return CutProblem(
        costs=cost(rows),
        output_bytes=activation_bytes(rows, train.precision),
        skips=skips_of(rows, train.precision),
        devices=devices,
        micro_batches=micro_batches,
        schedule=schedule,
        link=machine.link,
        recompute=train.recompute,
        direct_skips=skips == "direct",
        keep_skips=keep_skips,
        stage_bytes=None if memory is None else memory(rows, train),
        memory_limit=np.inf if memory is None else limit,
    )


def plan_problem(
    plan: Plan, cost: CostModel, machine: Machine, memory: MemoryModel | None = None
) -> CutProblem:
    """The problem that a plan's cuts answer; the simulator times the plan by it."""
    return cut_problem(
        plan.table,
        cost,
        train=plan.train,
        devices=plan.devices,
        micro_batches=plan.micro_batches,
        schedule=plan.schedule,
        machine=machine,
        skips=plan.skips,
        memory=memory,
    )


def plan_stages(
    table: Sequence[LayerRow],
    cost: CostModel,
    *,
    spec: UNetSpec,
    train: TrainSpec,
    machine: Machine,
    stages: int,
    micro_batches: int | None = None,
    memory_limit: float | None = None,
    schedule: Schedule = "gpipe",
    placement: Placement = "straight",
    num_devices: int | None = None,
    skips: SkipRoute = "hop",
    memory: MemoryModel | None = None,
    recompute: Recompute | Literal["auto"] | None = None,
    tiles: int = 1,
    scene_shape: tuple[int, int] | None = None,
    check: PlanCheck | None = None,
    max_labels: int = 4000,
) -> Plan:
    """The plan of least step time; `find_plan` tells more about it. Arguments as there."""
    return find_plan(
        table,
        cost,
        spec=spec,
        train=train,
        machine=machine,
        stages=stages,
        micro_batches=micro_batches,
        memory_limit=memory_limit,
        schedule=schedule,
        placement=placement,
        num_devices=num_devices,
        skips=skips,
        memory=memory,
        recompute=recompute,
        tiles=tiles,
        scene_shape=scene_shape,
        check=check,
        max_labels=max_labels,
    ).plan


def find_plan(
    table: Sequence[LayerRow],
    cost: CostModel,
    *,
    spec: UNetSpec,
    train: TrainSpec,
    machine: Machine,
    stages: int,
    micro_batches: int | None = None,
    memory_limit: float | None = None,
    schedule: Schedule = "gpipe",
    placement: Placement = "straight",
    num_devices: int | None = None,
    skips: SkipRoute = "hop",
    memory: MemoryModel | None = None,
    recompute: Recompute | Literal["auto"] | None = None,
    tiles: int = 1,
    scene_shape: tuple[int, int] | None = None,
    check: PlanCheck | None = None,
    max_labels: int = 4000,
) -> Planned:
    """The cuts of least step time within the memory limit.

    Parameters
    ----------
    table : the layer table of the batch that one pipeline takes in a step.
    cost : seconds of rows, see `bigunet.cost`.
    stages : number of stages; a folded placement has two a device.
    micro_batches : their number, which divides the batch; None tries every one that does.
    memory_limit : bytes of each device; the machine's memory by default. Counts with `memory`
        only.
    num_devices : for the interleaved placement.
    recompute : instead of `train.recompute`; "auto" tries all, and so recomputes only where
        memory asks for it.
    check : exact peak bytes of a plan's devices, where `memory` estimates: plans over the limit
        are refused, and the search goes on with the estimate's limit lowered in proportion.
    max_labels : see `bigunet.search.best_cuts`.

    Raises
    ------
    PlanError : more stages than layers; a batch that does not divide; an impossible placement.
    MemoryBudgetError : nothing fits; says which device is over by how much at the cuts that come
        nearest, and the least number of stages that fits.
    """
    _check_stages(table, stages)
    devices = devices_of(placement, stages, num_devices)
    modes = [train.recompute] if recompute is None else [recompute]
    if recompute == "auto":
        modes = list(get_args(Recompute))
    group = len(set(devices)) if (placement, schedule) == ("interleaved", "1f1b") else 1
    counts = _micro_batch_counts(table[0].in_shape[0], micro_batches, group)
    best: Planned | None = None
    last_problem: CutProblem | None = None
    for mode in modes:
        training = train.replace(recompute=mode)
        for count in counts:
            problem = cut_problem(
                table,
                cost,
                train=training,
                devices=devices,
                micro_batches=count,
                schedule=schedule,
                machine=machine,
                skips=skips,
                memory=memory,
                memory_limit=memory_limit,
                keep_skips=placement == "folded",
            )
            last_problem = problem

            def plan_of(
                cuts: Sequence[int], training: TrainSpec = training, count: int = count
            ) -> Plan:
                return _plan(
                    table, cuts, spec, training, devices, count, schedule, skips, tiles,
                    scene_shape, machine,
                )  # fmt: skip

            found = _within_limit(problem, plan_of, check, max_labels)
            if found is not None and (best is None or found.seconds < best.seconds):
                best = found
    if best is None:
        assert last_problem is not None
        if check is not None and best_cuts(last_problem, max_labels=300) is not None:
            fail(
                MemoryBudgetError,
                rule=f"each device holds its stages in {last_problem.memory_limit / 2**30:.3f} GiB",
                got=f"plans that fit by the estimate, but not when checked ({_CHECKS} of them)",
                remedy="Use more stages, smaller micro-batches, or recompute.",
            )
        explain_misfit(last_problem, placement)
    return best


def _within_limit(
    problem: CutProblem,
    plan_of: Callable[[Sequence[int]], Plan],
    check: PlanCheck | None,
    max_labels: int,
) -> Planned | None:
    """The best plan whose checked peaks are within the limit, too."""
    limit = problem.memory_limit
    for _ in range(_CHECKS):
        found = best_cuts(problem, max_labels=max_labels)
        if found is None:
            return None
        plan = plan_of(found.cuts)
        peaks: Sequence[float] = ()
        if problem.stage_bytes is not None:
            peaks = peak_bytes(problem, np.array(found.cuts))[0].tolist()
            if check is not None:
                peaks = check(plan)
        if not peaks or max(peaks) <= limit:
            whole = tuple(int(p) for p in peaks)
            return Planned(plan, found.seconds, found.bound_seconds, found.proved, whole)
        # A little more than in proportion, so that the same cuts do not come back.
        lower = problem.memory_limit * (limit / max(peaks)) * 0.999
        problem = replace(problem, memory_limit=lower)
    return None


def balanced_plan(
    table: Sequence[LayerRow],
    cost: CostModel,
    *,
    by: Balance,
    spec: UNetSpec,
    train: TrainSpec,
    machine: Machine,
    stages: int,
    micro_batches: int,
    schedule: Schedule = "gpipe",
    skips: SkipRoute = "hop",
    memory: MemoryModel | None = None,
) -> Planned:
    """A straight plan balanced "by" layer times, bytes, parameters, or as fairscale does.

    Neither transfers nor limits are looked at; `seconds` is the step time all the same. By memory
    means the bytes each layer adds to its stage, of the memory model (needed for that).
    """
    _check_stages(table, stages)
    devices = devices_of("straight", stages)
    problem = cut_problem(
        table, cost, train=train, devices=devices, micro_batches=micro_batches,
        schedule=schedule, machine=machine, skips=skips, memory=memory,
    )  # fmt: skip
    seconds = problem.costs.forward_seconds + problem.costs.backward_seconds
    if by == "time":
        cuts = balance(seconds.tolist(), stages)
    elif by == "parameters":
        cuts = balance([row.parameters for row in table], stages)
    elif by == "fairscale":
        cuts = block_partition(seconds.tolist(), stages)
    elif problem.stage_bytes is None:
        fail(PlanError, rule="balancing by memory needs a memory model", remedy="Pass memory=.")
    else:
        first = np.arange(len(table))
        weights = problem.stage_bytes(first, first + 1, in_flight=micro_batches, stage=0)
        cuts = balance([float(w) for w in weights], stages)
    both = np.array([cuts])
    time = float(step_seconds(problem, both)[0])
    peaks = peak_bytes(problem, both)[0] if memory is not None else ()
    plan = _plan(
        table, cuts, spec, train, devices, micro_batches, schedule, skips, 1, None, machine
    )
    return Planned(plan, time, 0.0, False, tuple(int(p) for p in peaks))


def _plan(
    table: Sequence[LayerRow],
    cuts: Sequence[int],
    spec: UNetSpec,
    train: TrainSpec,
    devices: tuple[int, ...],
    micro_batches: int,
    schedule: Schedule,
    skips: SkipRoute,
    tiles: int,
    scene_shape: tuple[int, int] | None,
    machine: Machine,
) -> Plan:
    return Plan(
        spec=spec,
        train=train,
        shape_BCHW=table[0].in_shape,
        stages=tuple((table[a].name, table[b - 1].name) for a, b in pairwise(cuts)),
        devices=devices,
        micro_batches=micro_batches,
        schedule=schedule,
        skips=skips,
        tiles=tiles,
        scene_shape=scene_shape,
        machine=machine.name,
    )


def _check_stages(table: Sequence[LayerRow], stages: int) -> None:
    if not 1 <= stages <= len(table):
        fail(
            PlanError,
            rule=f"the number of stages is 1 to {len(table)}, the layers",
            got=stages,
            remedy="Ask for fewer stages.",
        )


def _micro_batch_counts(batch: int, asked: int | None, group: int) -> list[int]:
    if asked is not None:
        return [asked]  # micro_batch_rows checks it
    counts = [m for m in range(group, batch + 1, group) if batch % m == 0]
    if not counts:
        fail(
            PlanError,
            rule=f"interleaved 1f1b takes micro-batches in groups of {group} devices",
            got=f"a batch of {batch}",
            remedy=f"Use a batch that is a multiple of {group}.",
        )
    return counts
