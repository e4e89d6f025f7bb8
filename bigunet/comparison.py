"""The best plan beside other ways to cut, in one plain table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from bigunet.cost import CostModel
from bigunet.errors import BigUNetError
from bigunet.layers import LayerRow
from bigunet.machines import Machine
from bigunet.plan import Schedule
from bigunet.planner import Balance, MemoryModel, Planned, balanced_plan, find_plan
from bigunet.spec import TrainSpec, UNetSpec

__all__ = ["compare_plans"]


def compare_plans(
    table: Sequence[LayerRow],
    cost: CostModel,
    *,
    spec: UNetSpec,
    train: TrainSpec,
    machine: Machine,
    num_devices: int,
    micro_batches: int,
    schedule: Schedule = "gpipe",
    memory: MemoryModel | None = None,
) -> list[dict[str, Any]]:
    """One dict for each way to cut for `num_devices` devices, ready for JSON.

    "best" and "folded" keep to the machine's memory where a memory model is given; the balances
    ignore it, and "memory" is left out without a model. `plan` is the `Plan` as a dict, or None
    with `error` set where the way does not work for this network.
    """
    common: dict[str, Any] = {
        "spec": spec,
        "train": train,
        "machine": machine,
        "micro_batches": micro_batches,
        "schedule": schedule,
        "memory": memory,
    }

    def planned(way: str) -> Planned:
        if way == "best":
            return find_plan(table, cost, stages=num_devices, **common)
        if way == "folded":
            return find_plan(table, cost, stages=2 * num_devices, placement="folded", **common)
        by: Any = way
        return balanced_plan(table, cost, by=by, stages=num_devices, **common)

    ways = ["best", "folded", *get_args(Balance)]
    if memory is None:
        ways.remove("memory")
    result = []
    for way in ways:
        entry: dict[str, Any] = {"way": way, "plan": None, "error": None}
        try:
            found = planned(way)
        except BigUNetError as error:
            entry["error"] = str(error)
        else:
            entry |= {
                "plan": found.plan.to_dict(),
                "cuts": list(found.plan.cuts),
                "step_seconds": found.seconds,
                "peak_bytes": list(found.peak_bytes),
                "fits": all(p <= machine.processor.memory_bytes for p in found.peak_bytes),
            }
        result.append(entry)
    return result
