"""Phase maps: which strategy wins over two properties of the problem."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import numpy as np
import xarray as xr

from bigunet.cost import RooflineCost
from bigunet.errors import PlanError, fail
from bigunet.layers import count_parameters
from bigunet.machines import Machine
from bigunet.scaling.best import Choice, Space, choose
from bigunet.scaling.setting import STRATEGIES, TERMS, Setting
from bigunet.spec import TrainSpec, UNetSpec

__all__ = ["PhaseAxis", "map_space", "phase_map"]

PhaseAxis = Literal["image", "channels", "gpus"]


def map_space(machine: Machine) -> Space:
    """Smaller than `best`'s space, so that a map of 1600 points is there in a few seconds.

    Pipelines have as many stages as a node has GPUs, at most 8.
    """
    num = min(8, max(2, machine.num_devices))
    return Space(tiles=(256, 512, 1024, 2048), stages=(num,), micro_batches=(4,))


_FIELDS = ("tile", "stages", "micro_batches")


def phase_map(
    spec: UNetSpec,
    train: TrainSpec,
    machine: Machine,
    *,
    x: Sequence[int],
    y: Sequence[int],
    along: tuple[PhaseAxis, PhaseAxis] = ("image", "channels"),
    image: int = 10_000,
    gpus: int = 64,
    space: Space | None = None,
    search: bool = False,
    **options: Any,
) -> xr.Dataset:
    """The best strategy at every point of a grid.

    Parameters
    ----------
    x, y : values along the two axes, rising.
    along : what they are: "image", the side of a square image in pixels; "channels", the width
        of the network's first level; "gpus". What is no axis is `image`, `spec.channels`, `gpus`.
    space : what the strategies choose from at every point, `map_space(machine)` by default.
    search : whether each pipeline's cuts are searched for, as `best` does it, instead of balanced;
        takes minutes.
    options : images, weak, cropped, schedule, all_reduce, algorithm, pixel_bytes, as for
        `bigunet.scaling.predict`.

    Returns
    -------
    Dataset over dimensions named as `along`, y first: `winner`, the number of the strategy in
    coordinate `strategy`, -1 where none fits or can be formed; `step_seconds` (NaN there),
    `lead`, the runner-up's time over the winner's; `tile`, `stages`, `micro_batches` of the
    winner (0 where it has none); `term`, the number of its longest term after compute;
    `parameters` over "channels", if that is an axis.

    Raises
    ------
    PlanError : axes that are not two different ones, values below 1 or GPUs the machine lacks.
    """
    if len(along) != 2 or along[0] == along[1] or set(along) - set(get_args(PhaseAxis)):
        fail(
            PlanError,
            rule=f"a map lies along two of {', '.join(get_args(PhaseAxis))}",
            got=along,
            remedy="Name two different ones.",
        )
    for axis, values in zip(along, (x, y), strict=True):
        if not len(values) or any(isinstance(v, bool) or int(v) != v or v < 1 for v in values):
            fail(
                PlanError,
                rule=f"values along {axis} are whole numbers >= 1",
                got=values,
                remedy="Change them.",
            )
    space = space or map_space(machine)
    shape = (len(y), len(x))
    winner = np.full(shape, -1, dtype=np.int64)
    seconds, lead = np.full(shape, np.nan), np.full(shape, np.nan)
    term = np.full(shape, -1, dtype=np.int64)
    fields = {name: np.zeros(shape, dtype=np.int64) for name in _FIELDS}
    cost = RooflineCost(machine.processor, train.precision)
    specs: dict[int, UNetSpec] = {spec.channels: spec}
    with _no_collection():
        for i, second in enumerate(y):
            for j, first in enumerate(x):
                at: dict[str, int] = {"image": image, "channels": spec.channels, "gpus": gpus}
                at |= {along[0]: int(first), along[1]: int(second)}
                channels = at["channels"]
                if channels not in specs:
                    specs[channels] = spec.replace(channels=channels)
                choice = _at(
                    specs[channels],
                    train,
                    machine,
                    cost,
                    at["image"],
                    at["gpus"],
                    space,
                    {**options, "search": search},
                )
                if choice is None:
                    continue
                outcome = choice.outcome
                winner[i, j] = STRATEGIES.index(choice.strategy)
                seconds[i, j] = outcome.seconds
                if choice.runner_up_outcome is not None:
                    lead[i, j] = choice.runner_up_outcome.seconds / outcome.seconds
                rest = outcome.terms[1:]
                term[i, j] = 1 + rest.index(max(rest))
                for name in _FIELDS:
                    fields[name][i, j] = getattr(choice.best, name) or 0
    dims = (along[1], along[0])
    data: dict[str, Any] = {
        "winner": (dims, winner),
        "step_seconds": (dims, seconds, {"units": "s"}),
        "lead": (dims, lead, {"units": "1"}),
        "term": (dims, term),
        **{name: (dims, values) for name, values in fields.items()},
    }
    data["tile"] = (dims, fields["tile"], {"units": "pixel"})
    if "channels" in along:
        values = x if along[0] == "channels" else y
        counts = [count_parameters(specs[int(v)]) for v in values]
        data["parameters"] = ("channels", np.array(counts), {"units": "1"})
    return xr.Dataset(
        data,
        coords={
            along[0]: np.asarray(x),
            along[1]: np.asarray(y),
            "strategy": list(STRATEGIES),
            "term_name": list(TERMS),
        },
        attrs={"machine": machine.name, "image": image, "gpus": gpus, **_plain(options)},
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """What is made meanwhile is kept: looking through it for cycles would only take time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _at(
    spec: UNetSpec,
    train: TrainSpec,
    machine: Machine,
    cost: RooflineCost,
    image: int,
    gpus: int,
    space: Space,
    options: dict[str, Any],
) -> Choice | None:
    if image < spec.stride:
        return None
    setting = Setting.of(spec, (image, image), train, machine, cost=cost, **options)
    setting.check_gpus(gpus)
    return choose(setting, gpus, space)


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return {k: int(v) if isinstance(v, bool) else v for k, v in options.items()}
