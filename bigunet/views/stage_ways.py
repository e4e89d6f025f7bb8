"""Ways to a state of StageExplorer: balanced, planned, or read from an export."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from bigunet.balance import balance
from bigunet.cost import micro_batch_rows
from bigunet.errors import PlanError, SpecError, fail
from bigunet.plan import Placement, Plan, devices_of
from bigunet.planner import balanced_plan, find_plan
from bigunet.views.stage_tables import StageSetting, StageState

__all__ = [
    "MOST_STAGES",
    "WAYS",
    "balanced",
    "by_time",
    "state_from_dict",
    "state_from_plan",
    "state_to_dict",
]

MOST_STAGES = 12

#: Text and tooltip of a button, and the way of `balanced`.
WAYS = (
    ("Balance by time", "Stages of equal time", "time"),
    ("Balance by memory", "Stages of equal memory", "memory"),
    ("fairscale's", "The cuts of fairscale's balance_by_time", "fairscale"),
    ("Best", "The cuts of least step time within the memory", "best"),
    ("Folded", "First and last stages on one device, so that no skip leaves it", "folded"),
)


def by_time(setting: StageSetting, state: StageState, stages: int) -> tuple[int, ...]:
    """Cuts of so many stages of equal time, forward and backward.

    Raises
    ------
    PlanError, SpecError : for more stages than layers, or than can be shown.
    """
    if stages > MOST_STAGES:
        fail(
            SpecError,
            rule=f"at most {MOST_STAGES} stages are shown",
            got=stages,
            remedy="Use fewer, or plan without the explorer.",
        )
    costs = setting.machine(state.machine)[1](micro_batch_rows(setting.table, state.micro_batches))
    both = costs.forward_seconds + costs.backward_seconds
    return balance(both.tolist(), stages)[1:-1]


def balanced(setting: StageSetting, state: StageState, way: str) -> StageState:
    """`state` on as many devices, cut in another way (see `bigunet.comparison`).

    Raises
    ------
    MemoryBudgetError : where nothing fits. PlanError : where the way does not work.
    """
    plan = setting.plan(state)
    machine, cost = setting.machine(state.machine)
    common: dict[str, Any] = {
        "spec": plan.spec,
        "train": plan.train,
        "machine": machine,
        "micro_batches": plan.micro_batches,
        "schedule": plan.schedule,
        "skips": plan.skips,
        "memory": setting.memory,
    }
    devices, folded = plan.num_devices, way == "folded"
    if folded and 2 * devices > MOST_STAGES:
        fail(
            SpecError,
            rule=f"a folded plan has two stages a device, at most {MOST_STAGES} here",
            got=f"{devices} devices",
            remedy="Use fewer stages.",
        )
    if way in ("best", "folded"):
        found = find_plan(
            setting.table, cost, stages=2 * devices if folded else devices,
            placement="folded" if folded else "straight", max_labels=1000, **common,
        )  # fmt: skip
    else:
        by: Any = way
        found = balanced_plan(setting.table, cost, by=by, stages=devices, **common)
    return dataclasses.replace(
        state, cuts=found.plan.cuts[1:-1], placement="folded" if folded else "straight"
    )


def _about(setting: StageSetting) -> dict[str, Any]:
    return {"spec": setting.spec.to_dict(), "shape_BCHW": list(setting.shape_BCHW)}


def state_to_dict(setting: StageSetting, state: StageState) -> dict[str, Any]:
    """Plain values of a state, with the network and the shape that it is of."""
    return _about(setting) | dataclasses.asdict(state) | {"cuts": list(state.cuts)}


def state_from_dict(setting: StageSetting, values: Mapping[str, Any]) -> StageState:
    """The inverse of `state_to_dict`.

    Raises
    ------
    SpecError : for another network or shape, or wrong fields. PlanError : for what is no plan.
    """
    own, names = _about(setting), {f.name for f in dataclasses.fields(StageState)}
    remedy = "Choose a file that an explorer of this network exported."
    if set(values) != names | set(own) or any(values[n] != own[n] for n in own):
        rule = "the state is of this network and shape, with the fields "
        got = ", ".join(map(str, values))
        fail(SpecError, rule=rule + ", ".join(sorted(names)), got=got, remedy=remedy)
    cuts = values["cuts"]
    if not isinstance(cuts, list) or not all(type(c) is int for c in cuts):
        fail(SpecError, rule="cuts are whole numbers", got=cuts, remedy=remedy)
    ends = [0, *cuts, len(setting.table)]
    if len(cuts) >= MOST_STAGES or any(a >= b for a, b in pairwise(ends)):
        rule = f"cuts rise between 0 and {ends[-1]}, fewer than {MOST_STAGES}"
        fail(SpecError, rule=rule, got=cuts, remedy=remedy)
    state = StageState(**{**{n: values[n] for n in names}, "cuts": tuple(cuts)})
    if state.height not in ("ms", "GiB"):
        fail(SpecError, rule="height is ms or GiB", got=state.height, remedy=remedy)
    setting.plan(state)  # refuses all the rest
    return state


def state_from_plan(setting: StageSetting, state: StageState, plan: Plan) -> StageState:
    """The state that a plan stands for; where its machine is not known here, that of `state`.

    Raises
    ------
    PlanError : for a plan of another network, batch or skip route, or on devices dealt otherwise.
    SpecError : for more stages than can be shown.
    """
    own = setting.plan(state)
    placement: Placement = "straight"
    if plan.num_devices < plan.num_stages:
        placement = "folded"
    same = all(getattr(plan, n) == getattr(own, n) for n in ("spec", "shape_BCHW", "skips"))
    if not same or plan.devices != devices_of(placement, plan.num_stages):
        fail(
            PlanError,
            rule=f"the plan is of this network on {setting.shape_BCHW}, its skips {setting.skips}, "
            "its stages straight or folded",
            got=f"{plan.shape_BCHW}, {plan.skips}, devices {plan.devices}",
            remedy="Make an explorer of the plan's own network and batch.",
        )
    names = [row.name for row in setting.table]
    values = _about(setting) | {
        "cuts": [names.index(first) for first, _ in plan.stages[1:]],
        "micro_batches": plan.micro_batches,
        "schedule": plan.schedule,
        "placement": placement,
        "recompute": plan.train.recompute,
        "machine": plan.machine if plan.machine in setting.all_machines else state.machine,
        "height": state.height,
    }
    return state_from_dict(setting, values)
