"""What StageExplorer shows, as data: a state and what stays fixed in, one dataset out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import xarray as xr

from bigunet.batch import Job
from bigunet.batch_script import batch_script, torchrun_command
from bigunet.cost import CostModel, RooflineCost, RowCosts
from bigunet.cuts import StageBytes, stage_peak, transfer_bytes
from bigunet.layers import LayerRow, Shape, layer_table
from bigunet.machines import MACHINES, Machine, pick
from bigunet.plan import Placement, Plan, Schedule, SkipRoute, devices_of
from bigunet.planner import MemoryModel, plan_problem
from bigunet.simulate import simulate
from bigunet.spec import Recompute, TrainSpec, UNetSpec
from bigunet.stage_memory import row_memory

__all__ = [
    "MEASURED",
    "StageSetting",
    "StageState",
    "launch_command",
    "launch_script",
    "moved_cut",
    "stage_tables",
]

#: Columns of a measured timeline, along `action`: see `bigunet.rehearsal.run_here`.
MEASURED = ("device", "stage", "micro_batch", "kind", "start", "end")


@dataclass(frozen=True)
class StageState:
    """Where the layers are cut and how the step runs.

    Parameters
    ----------
    cuts : row numbers at which the second and later stages begin, rising.
    height : what the bar of layers shows, milliseconds or GiB.
    """

    cuts: tuple[int, ...]
    micro_batches: int
    schedule: Schedule = "gpipe"
    placement: Placement = "straight"
    recompute: Recompute = "none"
    machine: str = "summit"
    height: Literal["ms", "GiB"] = "ms"

    @property
    def num_stages(self) -> int:
        return len(self.cuts) + 1


def moved_cut(cuts: Sequence[int], index: int, to: int, num_rows: int) -> tuple[int, ...]:
    """The cuts with one of them moved as far towards `to` as its neighbours allow."""
    low = cuts[index - 1] + 1 if index else 1
    high = cuts[index + 1] - 1 if index + 1 < len(cuts) else num_rows - 1
    return (*cuts[:index], min(max(to, low), high), *cuts[index + 1 :])


@dataclass(frozen=True, eq=False)
class StageSetting:
    """What stays the same while cuts move: the network, its batch, the machines to choose from.

    Parameters
    ----------
    shape_BCHW : the images that one pipeline takes in one step.
    machines : by name, a machine and the seconds of layers on it; those of `bigunet.machines` by
        the roofline model, where none are given, and in front of them those that are.
    skips, tiles, scene_shape : see `bigunet.plan.Plan`.
    """

    spec: UNetSpec
    shape_BCHW: Shape  # noqa: N815 - names carry their axes
    train: TrainSpec = field(default_factory=TrainSpec)
    machines: Mapping[str, tuple[Machine, CostModel]] = field(default_factory=dict)
    skips: SkipRoute = "hop"
    tiles: int = 1
    scene_shape: tuple[int, int] | None = None

    @cached_property
    def table(self) -> tuple[LayerRow, ...]:
        return layer_table(self.spec, self.shape_BCHW)

    @cached_property
    def all_machines(self) -> dict[str, tuple[Machine, CostModel]]:
        known: dict[str, tuple[Machine, CostModel]] = {
            name: (m, RooflineCost(m.processor, self.train.precision))
            for name, m in MACHINES.items()
        }
        both = {**self.machines, **{n: known[n] for n in known if n not in self.machines}}
        return {name: (m, _remembered(cost)) for name, (m, cost) in both.items()}

    @cached_property
    def memory(self) -> MemoryModel:
        """The memory model, which is slow, remembered by micro-batch and recomputation."""
        model = row_memory(self.spec)
        known: dict[tuple[int, str], StageBytes] = {}

        def remembered(rows: Sequence[LayerRow], train: TrainSpec) -> StageBytes:
            key = (rows[0].in_shape[0], train.recompute)
            if key not in known:
                known[key] = model(rows, train)
            return known[key]

        return remembered

    def plan(self, state: StageState) -> Plan:
        """The plan that a state stands for.

        Raises
        ------
        PlanError : for one that cannot be, such as folding an odd number of stages.
        """
        names = [row.name for row in self.table]
        ends = (0, *state.cuts, len(names))
        machine, _ = self.machine(state.machine)
        return Plan(
            spec=self.spec,
            train=self.train.replace(recompute=state.recompute),
            shape_BCHW=self.shape_BCHW,
            stages=tuple((names[a], names[b - 1]) for a, b in pairwise(ends)),
            devices=devices_of(state.placement, state.num_stages),
            micro_batches=state.micro_batches,
            schedule=state.schedule,
            skips=self.skips,
            tiles=self.tiles,
            scene_shape=self.scene_shape,
            machine=machine.name,
        )

    def machine(self, name: str) -> tuple[Machine, CostModel]:
        return pick(self.all_machines, name)


def _remembered(cost: CostModel) -> CostModel:
    """Seconds of rows by the micro-batch: within one setting the rows differ in nothing else."""
    known: dict[tuple[Any, ...], RowCosts] = {}

    def seconds(rows: Sequence[LayerRow]) -> RowCosts:
        key = (len(rows), rows[0].in_shape)
        if key not in known:
            known[key] = cost(rows)
        return known[key]

    return seconds


# What stands in for the user's scene where a plan is shown with the command that runs it.
_ARGUMENTS = ("scene.tif", "--labels", "labels.tif", "--out", "run")


def launch_command(plan: Plan) -> str:
    """The shell command that runs a saved plan on its ranks."""
    return torchrun_command(plan, "plan.yaml", _ARGUMENTS)


def launch_script(plan: Plan) -> str:
    """The same as a script that starts lost ranks again, as `bigunet launch` writes it."""
    return batch_script(Job(plan=plan, plan_path="plan.yaml", arguments=_ARGUMENTS, on="torchrun"))


def stage_tables(
    setting: StageSetting, state: StageState, measured: xr.Dataset | None = None
) -> xr.Dataset:
    """Layers, stages, devices, skips and the simulated step of a state.

    Dims `layer` (`layer_seconds` and `layer_bytes` of one micro-batch, `stage_of`), `of_stage`
    (a row of the plain table each), `of_device`, `skip` and `action` (see
    `bigunet.simulate.simulate`). With `measured`, a timeline with the columns `MEASURED`, also
    `measured_action`.

    Raises
    ------
    PlanError : for a state that is no plan.
    """
    plan = setting.plan(state)
    machine, cost = setting.machine(state.machine)
    problem = plan_problem(plan, cost, machine, setting.memory)
    step = simulate(plan, cost, machine, memory=setting.memory)
    rows, cuts = setting.table, np.array([[0, *state.cuts, len(setting.table)]])
    forward, backward = problem.costs.forward_seconds, problem.costs.backward_seconds
    num, devices = plan.num_stages, np.array(plan.devices)
    stage_of = np.searchsorted(cuts[0, 1:-1], np.arange(len(rows)), side="right")
    own = np.zeros(len(rows))
    assert problem.stage_bytes is not None
    peaks = np.zeros(num)
    for s in range(num):
        at = np.flatnonzero(stage_of == s)
        own[at] = problem.stage_bytes(at, at + 1, in_flight=1, stage=s)
        peaks[s] = stage_peak(problem, s, cuts[0, s], cuts[0, s + 1])
    sent = {pair: int(b[0]) for pair, b in transfer_bytes(problem, cuts).items()}
    crossed = [_hops(plan, stage_of[s.source], stage_of[s.sink]) for s in problem.skips]
    seconds, size = {"units": "s"}, {"units": "byte"}
    ends = cuts[0]
    data: dict[str, Any] = {
        "layer_seconds": ("layer", forward + backward, seconds),
        "layer_bytes": ("layer", own, size),
        "stage_of": ("layer", stage_of),
        "stage_device": ("of_stage", devices),
        "first": ("of_stage", [first for first, _ in plan.stages]),
        "last": ("of_stage", [last for _, last in plan.stages]),
        "num_layers": ("of_stage", np.diff(ends)),
        "forward": ("of_stage", np.add.reduceat(forward, ends[:-1]), seconds),
        "backward": ("of_stage", np.diff(problem.backward_before[ends]), seconds),
        "in_flight": ("of_stage", list(problem.most_in_flight)),
        "peak": ("of_stage", peaks, size),
        # To the next stage, and on to later ones.
        "sends": ("of_stage", [sum(b for (s, _), b in sent.items() if s == i) for i in range(num)],
                  size),
        "device_peak": ("of_device", np.bincount(devices, weights=peaks), size),
        "skip_source": ("skip", [s.source for s in problem.skips]),
        "skip_sink": ("skip", [s.sink for s in problem.skips]),
        "skip_bytes": ("skip", [s.num_bytes for s in problem.skips], size),
        "skip_hops": ("skip", crossed),
    }  # fmt: skip
    for name in ("device", "stage", "micro_batch", "kind", "start", "end"):
        data[name] = step[name]
    data |= {"busy": step["busy"], "idle": step["idle"]}
    attrs = {
        **step.attrs,
        "cuts": state.cuts,
        "limit_bytes": float(machine.processor.memory_bytes),
        "micro_batches": plan.micro_batches,
        "schedule": plan.schedule,
        "height": state.height,
        "recompute": state.recompute,
        "placement": state.placement,
        "processor": machine.processor.name,
        "about": _about(plan),
        "command": launch_command(plan),
        "skip_link_bytes": int(sum(h * s.num_bytes for h, s in
                                   zip(crossed, problem.skips, strict=True))),
    }  # fmt: skip
    if measured is not None:
        for name in MEASURED:
            data[f"measured_{name}"] = ("measured_action", measured[name].values)
        attrs["measured_seconds"] = float(measured.attrs["step_seconds"])
        attrs["measured_on"] = str(measured.attrs.get("machine", "measured"))
    return xr.Dataset(data, coords={"layer": _names(rows), "cause": step["cause"]}, attrs=attrs)


@lru_cache(maxsize=8)
def _names(rows: tuple[LayerRow, ...]) -> list[str]:
    return [row.name for row in rows]


def _hops(plan: Plan, source: int, sink: int) -> int:
    """Links that a skip takes from the stage that made it to the one that joins it."""
    devices = plan.devices
    if devices[source] == devices[sink]:
        return 0
    if plan.skips == "direct":
        return 1
    return sum(devices[s] != devices[s + 1] for s in range(source, sink))


def _about(plan: Plan) -> str:
    batch, _, height, width = plan.shape_BCHW
    return f"{plan.train.precision}, batch {batch} of {height} x {width}, {plan.train.optimiser}"
