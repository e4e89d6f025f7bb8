"""What ScalingExplorer shows, as data: a state in, `bigunet.scaling`'s predictions out.

Pipelines are balanced by time, not searched for (`search=False`), so that a prediction takes
milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from bigunet.cost import CostModel
from bigunet.errors import MemoryBudgetError, PlanError, SpecError, fail
from bigunet.machines import MACHINES, Machine, pick
from bigunet.scaling import STRATEGIES, TERMS, Choice, best, phase_map, predict
from bigunet.scaling.evaluate import check_strategy, evaluate
from bigunet.scaling.setting import Outcome, Setting, Strategy
from bigunet.scaling_file import measured_curve, scaling_setting
from bigunet.spec import TrainSpec, UNetSpec

__all__ = [
    "MOST_GPUS",
    "ScalingSetting",
    "ScalingState",
    "choice_of",
    "gpu_stops",
    "map_key",
    "map_of",
    "scaling_tables",
    "with_choice",
]

MOST_GPUS = 10_000
_STOPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
          2048, 3072, 4096, 6144, 8192, MOST_GPUS)  # fmt: skip
# Balancing takes long for more stages: the curve of one pipeline ends here.
_MOST_STAGES = 8
_MAP_GPUS, _MAP_IMAGES = 12, (500, 1000, 2000, 4000, 8000, 16_000, 32_000)
_MOST_KEPT = 64


@dataclass(frozen=True)
class ScalingState:
    """A network and its training, square images, a machine, and how many GPUs of it.

    Parameters
    ----------
    train : `train.tile` is the side of the tiles' cores in pixels.
    image : side of the images in pixels.
    images : images in a step; with `weak` for each GPU.
    strategy : the one whose time is taken apart.

    Raises
    ------
    SpecError : for numbers below 1. PlanError : for an unknown strategy, or no machine's name.
    """

    spec: UNetSpec = field(default_factory=UNetSpec)
    train: TrainSpec = field(default_factory=lambda: TrainSpec(tile=512))
    image: int = 10_000
    images: int = 64
    weak: bool = False
    machine: str = "summit"
    strategy: Strategy = "sample-parallel"
    gpus: int = 1536

    def __post_init__(self) -> None:
        for name in ("image", "images", "gpus"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                fail(
                    SpecError,
                    rule=f"{name} is a whole number >= 1",
                    got=value,
                    remedy="Change it.",
                )
        if not isinstance(self.machine, str):
            fail(PlanError, rule="a machine is named", got=self.machine, remedy="Name one.")
        if type(self.weak) is not bool:
            fail(SpecError, rule="weak is true or false", got=self.weak, remedy="Change it.")
        check_strategy(self.strategy)


def gpu_stops(machine: Machine) -> tuple[int, ...]:
    """Numbers of GPUs to choose from, about equally far apart in their logarithm."""
    most = min(machine.max_devices, MOST_GPUS)
    return (*(n for n in _STOPS if n < most), most)


def _counts(machine: Machine) -> tuple[int, ...]:
    """Numbers of GPUs of the curves: powers of two, and the last."""
    most = min(machine.max_devices, MOST_GPUS)
    return (*(2**i for i in range(14) if 2**i < most), most)


@dataclass(eq=False)
class ScalingSetting:
    """What stays while a state changes: the machines to choose from, and what was measured.

    Parameters
    ----------
    machines : by name, a machine and the seconds of layers on it, as of
        `bigunet.views.StageExplorer`; in front of those of `bigunet.machines`.
    measured : of `bigunet.scaling_file.load_scaling`.
    """

    machines: Mapping[str, tuple[Machine, CostModel]] = field(default_factory=dict)
    measured: xr.Dataset | None = None

    def __post_init__(self) -> None:
        self._curves: dict[object, dict[int, dict[Strategy, Outcome]]] = {}
        self._choices: dict[ScalingState, Choice | str] = {}

    @cached_property
    def all_machines(self) -> dict[str, tuple[Machine, CostModel | None]]:
        known = {name: (m, None) for name, m in MACHINES.items() if name not in self.machines}
        return {**self.machines, **known}

    def machine(self, name: str) -> tuple[Machine, CostModel | None]:
        """A machine, and the seconds of its layers where they are not the roofline's."""
        return pick(self.all_machines, name)

    def model(self, state: ScalingState) -> Setting:
        """The state as `bigunet.scaling` takes it."""
        machine, cost = self.machine(state.machine)
        return Setting.of(
            state.spec, (state.image, state.image), state.train, machine, cost=cost,
            images=state.images, weak=state.weak, search=False,
        )  # fmt: skip

    def outcomes(self, state: ScalingState) -> dict[int, dict[Strategy, Outcome]]:
        """By number of GPUs and strategy; the curves are worked out once for all `state.gpus`."""
        model = self.model(state)
        model.check_gpus(state.gpus)
        key = (state.spec, state.train, state.image, state.images, state.weak, state.machine)
        if key not in self._curves:
            if len(self._curves) >= _MOST_KEPT:
                self._curves.pop(next(iter(self._curves)))
            self._curves[key] = {
                n: {
                    s: evaluate(model, s, n, tile=state.train.tile)
                    for s in STRATEGIES
                    if s != "pipeline" or n <= _MOST_STAGES
                }
                for n in _counts(model.machine)
            }
        found = self._curves[key]
        chosen = found.get(state.gpus, {})
        more = {
            s: chosen[s] if s in chosen else evaluate(model, s, state.gpus, tile=state.train.tile)
            for s in STRATEGIES
        }
        return {n: more if n == state.gpus else found[n] for n in sorted({*found, state.gpus})}


def scaling_tables(
    setting: ScalingSetting, state: ScalingState, found_map: xr.Dataset | None = None
) -> xr.Dataset:
    """Steps by strategy and number of GPUs, as `bigunet.scaling.predict` has them.

    Returns
    -------
    Dataset over `strategy`, `gpus` (the chosen number among them) and `term`: `seconds`,
    `step_seconds`, `speedup` over one GPU by the same strategy, `efficiency`,
    `images_per_second`, `memory_bytes`, `feasible`, `gpu_hours` and `energy_joules` of a step.
    NaN where a strategy was not asked for, or cannot be formed. With a measured table, also
    `measured_*` over `measured`; with a map, `map_*` over `map_image` and `map_gpus`.

    Raises
    ------
    PlanError, ShapeError : as `bigunet.scaling.predict`.
    """
    outcomes = setting.outcomes(state)
    machine, _ = setting.machine(state.machine)
    gpus = np.array(list(outcomes))
    shape = (len(STRATEGIES), len(gpus))
    seconds = np.full((*shape, len(TERMS)), np.nan)
    memory, feasible = np.zeros(shape), np.zeros(shape, bool)
    one = np.array([outcomes[1][s].seconds for s in STRATEGIES])
    idle = np.zeros(shape, int)
    for j, by_strategy in enumerate(outcomes.values()):
        for i, strategy in enumerate(STRATEGIES):
            outcome = by_strategy.get(strategy)
            if outcome is not None and math.isfinite(outcome.seconds):
                seconds[i, j] = outcome.terms
                memory[i, j], feasible[i, j] = outcome.memory_bytes, outcome.feasible
                idle[i, j] = outcome.idle_gpus
    step = seconds.sum(axis=2)
    images = state.images * (gpus if state.weak else np.ones_like(gpus))
    speedup = one[:, None] / step * (gpus if state.weak else 1)
    nodes = -(-gpus // machine.num_devices)
    watts = (machine.processor.watts or np.nan) * gpus + machine.overhead_watts * nodes
    dims = ("strategy", "gpus")
    data: dict[str, Any] = {
        "seconds": ((*dims, "term"), seconds, {"units": "s"}),
        "step_seconds": (dims, step, {"units": "s"}),
        "speedup": (dims, speedup, {"units": "1"}),
        "efficiency": (dims, speedup / gpus, {"units": "1"}),
        "images_per_second": (dims, images / step, {"units": "1/s"}),
        "memory_bytes": (dims, memory, {"units": "byte"}),
        "idle_gpus": (dims, idle, {"units": "1"}),
        "feasible": (dims, feasible),
        "gpu_hours": (dims, step * gpus / 3600, {"units": "h"}),
        "energy_joules": (dims, step * watts, {"units": "J"}),
        "images": ("gpus", images, {"units": "1"}),
    }
    attrs: dict[str, Any] = {
        "strategy": state.strategy,
        "chosen": state.gpus,
        "machine": machine.name,
        "processor": machine.processor.name,
        "capacity_bytes": float(machine.processor.memory_bytes),
        "weak": state.weak,
        "image": state.image,
        "images": state.images,
        "tile": state.train.tile,
        "network": f"{state.spec.levels} levels x {state.spec.channels} channels",
        "training": f"{state.train.precision}, batch {state.train.batch}, {state.train.optimiser}",
    }
    if setting.measured is not None:
        _add_measured(data, attrs, setting, state)
    if found_map is not None:
        for name in ("winner", "lead", "tile"):
            data[f"map_{name}"] = (("map_image", "map_gpus"), found_map[name].values)
        data["map_gpus"] = ("map_gpus", found_map["gpus"].values)
        data["map_image"] = ("map_image", found_map["image"].values)
        attrs["map_of"] = found_map.attrs["of"]
        attrs["map_stale"] = found_map.attrs["key"] != map_key(state)
    coords = {"strategy": list(STRATEGIES), "gpus": gpus, "term": list(TERMS)}
    return xr.Dataset(data, coords, attrs)


def _add_measured(
    data: dict[str, Any], attrs: dict[str, Any], setting: ScalingSetting, state: ScalingState
) -> None:
    """The measured curve and, where it is of this very state, the seconds predicted for it."""
    assert setting.measured is not None
    curve = measured_curve(setting.measured)
    spec, train, shape = scaling_setting(setting.measured)
    kind = setting.measured.attrs["kind"]
    numbers = [int(n) for n in curve["gpus"].values]
    images = setting.measured["images"].sel(gpus=curve["gpus"]).values
    each = images // (curve["gpus"].values if kind == "weak" else 1)
    same = (
        (spec, train, shape) == (state.spec, state.train, (state.image, state.image))
        and (kind == "weak") == state.weak
        and all(each == state.images)
    )
    predicted = np.full(len(numbers), np.nan)
    machine, _ = setting.machine(state.machine)
    if same:
        model = setting.model(state)
        predicted = np.array(
            [
                evaluate(model, "sample-parallel", n, tile=state.train.tile).seconds
                if n <= machine.max_devices
                else np.nan
                for n in numbers
            ]
        )
    data["measured_gpus"] = ("measured", np.array(numbers))
    for name in ("step_seconds", "speedup", "efficiency"):
        data[f"measured_{name}"] = ("measured", curve[name].values)
    data["measured_predicted"] = ("measured", predicted, {"units": "s"})
    attrs["measured_same"] = same
    attrs["measured_about"] = (
        f"{kind} scaling of {spec.levels} levels x {spec.channels} channels, tiles of "
        f"{train.tile}, {shape[0]} x {shape[1]} pixels, on {setting.measured.attrs['device']}"
    )


# The best choice ---------------------------------------------------------------------------------


def choice_of(setting: ScalingSetting, state: ScalingState) -> Choice | str:
    """`bigunet.scaling.best` for the state, remembered; or why there is none, in words."""
    if state not in setting._choices:
        if len(setting._choices) >= _MOST_KEPT:
            setting._choices.pop(next(iter(setting._choices)))
        machine, cost = setting.machine(state.machine)
        found: Choice | str
        try:
            found = best(
                state.spec, (state.image, state.image), state.train, machine, state.gpus,
                images=state.images, weak=state.weak, cost=cost, search=False,
            )  # fmt: skip
        except (MemoryBudgetError, PlanError) as error:
            found = str(error)
        setting._choices[state] = found
    return setting._choices[state]


def with_choice(setting: ScalingSetting, state: ScalingState, data: xr.Dataset) -> xr.Dataset:
    """`scaling_tables`' dataset with the best choice, in words, and why the shown does not fit."""
    found = choice_of(setting, state)
    more: dict[str, Any] = {"reason": ""}
    chosen = data.sel(strategy=state.strategy, gpus=state.gpus)
    if not bool(chosen["feasible"]) or int(chosen["idle_gpus"]):
        machine, cost = setting.machine(state.machine)
        told = predict(
            state.spec, (state.image, state.image), state.train, machine, state.gpus,
            state.strategy, tile=state.train.tile, images=state.images, weak=state.weak, cost=cost,
            search=False,
        )  # fmt: skip
        more["reason"] = str(told["reason"].values[0])
    if isinstance(found, str):
        more["nothing"] = found
    else:
        more |= {
            "best": str(found.best),
            "best_strategy": found.strategy,
            "best_seconds": found.seconds,
            "why": found.why,
        }
        if found.runner_up is not None:
            more["runner_up"] = str(found.runner_up)
    return data.assign_attrs(more)


# The phase map -----------------------------------------------------------------------------------


def map_key(state: ScalingState) -> tuple[Any, ...]:
    """What a map depends on: all but its axes, and the tile, which it chooses itself."""
    train = tuple((k, str(v)) for k, v in state.train.to_dict().items() if k != "tile")
    return (state.spec, train, state.images, state.weak, state.machine)


def map_of(setting: ScalingSetting, state: ScalingState) -> xr.Dataset:
    """A coarse `bigunet.scaling.phase_map` of GPUs and image sizes for this network and machine.

    Seconds of layers are the roofline's on every machine.
    """
    machine, _ = setting.machine(state.machine)
    stops = gpu_stops(machine)
    # Evenly taken from the stops, the first and the last among them.
    at = np.unique(np.linspace(0, len(stops) - 1, _MAP_GPUS).round().astype(int))
    sides = [n for n in _MAP_IMAGES if n >= state.spec.stride]
    found = phase_map(
        state.spec, state.train, machine, x=[stops[i] for i in at], y=sides,
        along=("gpus", "image"), images=state.images, weak=state.weak,
    )  # fmt: skip
    per = "images a GPU" if state.weak else "images"
    about = (
        f"{machine.name}, {state.spec.levels} levels x {state.spec.channels}, {state.images} {per}"
    )
    return found.assign_attrs(key=map_key(state), of=about)
