"""One step of a plan, simulated: timeline, idle time by cause, bytes by link, memory over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from bigunet.cost import CostModel
from bigunet.cuts import CutProblem, durations, stage_peak, transfer_bytes
from bigunet.machines import Machine
from bigunet.plan import Plan
from bigunet.planner import MemoryModel, plan_problem
from bigunet.schedule import Action, actions
from bigunet.timeline import Durations, Step, run, topological

__all__ = [
    "IDLE_CAUSES",
    "one_device_seconds",
    "simulate",
    "simulation_table",
    "stages_table",
]

IDLE_CAUSES = ("start-up", "imbalance", "transfer")

Floats = NDArray[np.float64]


def simulate(
    plan: Plan, cost: CostModel, machine: Machine, *, memory: MemoryModel | None = None
) -> xr.Dataset:
    """Simulate one step of one pipeline of the plan.

    Returns
    -------
    A dataset with, along `action` (sorted by start): `device`, `stage`, `micro_batch`, `kind`,
    `peer` (-1 for none), `num_bytes` (of sends) and `start`, `end` in seconds; `busy` (device) and
    `idle` (device, cause) in seconds; `link_bytes` (source, target); and with a memory model,
    along `moment`: `memory_device`, `memory_time` and `memory_bytes` from then on. Attributes:
    `step_seconds`, `bubble` (idle share of all devices' time), `speed_up` over one device that
    takes the whole batch at once without recomputation, memory aside.

    Over a link whose messages the processors copy (`Link.by_processors`, as between ranks of one
    CPU), a transfer's seconds are part of the passes at both of its ends.

    Idle causes are differences between three simulations, so that they add up exactly: "start-up"
    is what a device idles with equal stages and no transfers, that is the schedule's own bubble;
    "imbalance" what the stages' true lengths add (negative on a device with more than its share
    of work); "transfer" what waiting for data adds.
    """
    problem = plan_problem(plan, cost, machine, memory)
    cuts = np.array([plan.cuts])
    lists = actions(plan)
    order = topological(lists)
    times = durations(problem, cuts)
    if plan.tiles > 1:
        times = replace(times, reduce=_reduce_seconds(plan, machine))
    steps: list[tuple[Step, float, float]] = []
    total = float(
        run(order, times, lambda step, a, b: steps.append((step, float(a[0]), float(b[0]))))[0]
    )
    steps.sort(key=lambda item: (item[1], item[0].device))
    sent = {pair: int(b[0]) for pair, b in transfer_bytes(problem, cuts).items()}
    sent |= {(t, s): b for (s, t), b in sent.items()}
    num_bytes = [
        sent[a.stage, a.peer] if a.kind == "send" and a.peer is not None else 0
        for a in (step.action for step, _, _ in steps)
    ]
    busy = _busy(steps, plan.num_devices)
    idle = _idle(order, times, total, busy, plan)
    link_bytes = np.zeros((plan.num_devices, plan.num_devices), dtype=np.int64)
    for (step, _, _), moved in zip(steps, num_bytes, strict=True):
        if step.link is not None:
            link_bytes[step.link] += moved
    seconds, size = {"units": "s"}, {"units": "byte"}
    kept: list[Action] = [step.action for step, _, _ in steps]
    data: dict[str, Any] = {
        "device": ("action", [step.device for step, _, _ in steps]),
        "stage": ("action", [a.stage for a in kept]),
        "micro_batch": ("action", [a.micro_batch for a in kept]),
        "kind": ("action", np.array([a.kind for a in kept], dtype="U9")),
        "peer": ("action", [-1 if a.peer is None else a.peer for a in kept]),
        "num_bytes": ("action", np.array(num_bytes, dtype=np.int64), size),
        "start": ("action", [start for _, start, _ in steps], seconds),
        "end": ("action", [end for _, _, end in steps], seconds),
        "busy": ("of_device", busy, seconds),
        "idle": (("of_device", "cause"), idle, seconds),
        "link_bytes": (("source", "target"), link_bytes, size),
    }
    if problem.stage_bytes is not None:
        device, time, level = _memory(problem, plan, steps)
        data["memory_device"] = ("moment", device)
        data["memory_time"] = ("moment", time, seconds)
        data["memory_bytes"] = ("moment", level, size)
    whole = plan.num_devices * total
    attrs = {
        "step_seconds": total,
        "bubble": float(whole - busy.sum()) / whole if whole else 0.0,
        "speed_up": one_device_seconds(plan, cost) / total if total else 1.0,
        "machine": machine.name,
    }
    return xr.Dataset(data, coords={"cause": list(IDLE_CAUSES)}, attrs=attrs)


def one_device_seconds(plan: Plan, cost: CostModel) -> float:
    """Seconds of forward and backward of the whole batch on one device, nothing recomputed."""
    costs = cost(plan.table)
    return float(costs.forward_seconds.sum() + costs.backward_seconds.sum())


def _busy(steps: Sequence[tuple[Step, float, float]], num_devices: int) -> Floats:
    busy = np.zeros(num_devices)
    for step, start, end in steps:
        if step.action.kind not in ("send", "receive"):
            busy[step.device] += end - start
    return busy


def _idle(
    order: Sequence[Step], times: Durations, total: float, busy: Floats, plan: Plan
) -> Floats:
    """(device, cause) idle seconds; see `simulate`."""
    free = {pair: np.zeros(1) for pair in times.transfer}
    no_transfers = replace(times, transfer=free)
    mean = [np.mean(np.stack(v), axis=0) for v in (times.forward, times.backward)]
    equal = Durations(
        [mean[0]] * plan.num_stages,
        [mean[1]] * plan.num_stages,
        [mean[0]] * plan.num_stages,
        free,
        [np.mean(np.stack(times.reduce), axis=0)] * plan.num_stages if times.reduce else (),
    )
    even_steps: list[tuple[Step, float, float]] = []
    even = float(
        run(order, equal, lambda s, a, b: even_steps.append((s, float(a[0]), float(b[0]))))[0]
    )
    uneven = float(run(order, no_transfers)[0])
    start_up = even - _busy(even_steps, plan.num_devices)
    imbalance = (uneven - busy) - start_up
    transfer = np.full(plan.num_devices, total - uneven)
    return np.stack([start_up, imbalance, transfer], axis=1)


def _reduce_seconds(plan: Plan, machine: Machine) -> list[Floats]:
    """Ring all-reduce of each stage's gradients over the pipelines.

    2 (R - 1) messages of 1/R of the gradients each, one after the other (Patarasuk and Yuan 2009,
    doi 10.1016/j.jpdc.2008.09.002), over the slowest link of the ring.
    """
    ranks = plan.tiles
    size = 2 if plan.train.precision == "bf16" else 4
    seconds = []
    for stage, device in enumerate(plan.devices):
        gradients = size * sum(row.parameters for row in plan.stage_rows(stage))
        ring = [r * plan.num_devices + device for r in range(ranks)]
        links = [machine.link(a, b) for a, b in zip(ring, ring[1:] + ring[:1], strict=True)]
        worst = max(
            link.latency_seconds + gradients / ranks / link.bytes_per_second for link in links
        )
        seconds.append(np.array([2 * (ranks - 1) * worst]))
    return seconds


def _memory(
    problem: CutProblem, plan: Plan, steps: Sequence[tuple[Step, float, float]]
) -> tuple[list[int], list[float], list[int]]:
    """(device, second, bytes from then on): a micro-batch is held from the start of its forward
    pass to the end of its backward pass."""
    assert problem.stage_bytes is not None
    cuts = plan.cuts
    most = max(problem.most_in_flight)
    levels = [
        [
            int(problem.stage_bytes(cuts[s], cuts[s + 1], in_flight=n, stage=s))
            for n in range(most + 1)
        ]
        for s in range(plan.num_stages)
    ]
    events = [(a, 1, step) for step, a, _ in steps if step.action.kind == "forward"]
    events += [(b, -1, step) for step, _, b in steps if step.action.kind == "backward"]
    # What is freed at a moment is free for what begins then.
    events.sort(key=lambda event: (event[0], event[1]))
    held = [0] * plan.num_stages
    now = [sum(levels[s][0] for s in plan.stages_of(d)) for d in range(plan.num_devices)]
    devices, times, amounts = list(range(plan.num_devices)), [0.0] * len(now), list(now)
    for time, change, step in events:
        stage = step.action.stage
        now[step.device] -= levels[stage][held[stage]]
        held[stage] += change
        now[step.device] += levels[stage][held[stage]]
        devices.append(step.device)
        times.append(time)
        amounts.append(now[step.device])
    return devices, times, amounts


# Tables for the command line and the views -------------------------------------------------------


def stages_table(
    plan: Plan, cost: CostModel, machine: Machine, *, memory: MemoryModel | None = None
) -> list[dict[str, Any]]:
    """One plain dict for each stage, ready for JSON: rows, seconds a micro-batch, bytes.

    `send_bytes` go on to later stages for each micro-batch, and as many gradients come back;
    `peak_bytes` is None without a memory model.
    """
    problem = plan_problem(plan, cost, machine, memory)
    cuts = np.array([plan.cuts])
    times = durations(problem, cuts)
    sent = transfer_bytes(problem, cuts)
    table = []
    for stage, (first, last) in enumerate(plan.stages):
        rows = plan.stage_rows(stage)
        peak = None
        if problem.stage_bytes is not None:
            peak = int(stage_peak(problem, stage, cuts[0, stage], cuts[0, stage + 1]))
        table.append(
            {
                "stage": stage,
                "device": plan.devices[stage],
                "first": first,
                "last": last,
                "num_layers": len(rows),
                "parameters": sum(row.parameters for row in rows),
                "forward_seconds": float(times.forward[stage][0]),
                "backward_seconds": float(times.backward[stage][0]),
                "send_bytes": sum(int(b[0]) for (s, _), b in sent.items() if s == stage),
                "in_flight": problem.most_in_flight[stage],
                "peak_bytes": peak,
                "limit_bytes": machine.processor.memory_bytes,
            }
        )
    return table


def simulation_table(result: xr.Dataset) -> dict[str, Any]:
    """A simulation as plain values, ready for JSON: totals, devices, links and actions."""
    names = ("device", "stage", "micro_batch", "kind", "peer", "num_bytes", "start", "end")
    columns = {name: result[name].values.tolist() for name in names}
    links = np.argwhere(result["link_bytes"].values)
    return {
        **result.attrs,
        "devices": [
            {
                "device": d,
                "busy_seconds": float(result["busy"][d]),
                "idle_seconds": {
                    str(cause): float(result["idle"].values[d, i])
                    for i, cause in enumerate(result["cause"].values)
                },
            }
            for d in range(result.sizes["of_device"])
        ],
        "links": [
            {"source": int(a), "target": int(b), "bytes": int(result["link_bytes"].values[a, b])}
            for a, b in links
        ],
        "actions": [
            dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)
        ],
    }
