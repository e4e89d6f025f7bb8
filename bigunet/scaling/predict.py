"""`predict`: the seconds of a step on many GPUs, term by term, as one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from bigunet.cost import CostModel, RooflineCost
from bigunet.errors import PlanError, fail
from bigunet.machines import Machine
from bigunet.plan import Schedule
from bigunet.scaling.collective import LINKS, Algorithm
from bigunet.scaling.evaluate import check_strategy, evaluate
from bigunet.scaling.remedies import what_fits
from bigunet.scaling.setting import TERMS, AllReduce, Outcome, Setting, Strategy
from bigunet.spec import TrainSpec, UNetSpec

__all__ = ["predict"]


def predict(
    spec: UNetSpec,
    scene_shape: tuple[int, int],
    train: TrainSpec,
    machine: Machine,
    gpus: int | Sequence[int],
    strategy: Strategy,
    *,
    tile: int | None = None,
    images: int = 1,
    weak: bool = False,
    cropped: bool = True,
    stages: int | None = None,
    micro_batches: int | None = None,
    schedule: Schedule = "gpipe",
    cost: CostModel | None = None,
    all_reduce: AllReduce = "end",
    algorithm: Algorithm = "auto",
    pixel_bytes: float = 1.0,
    search: bool = True,
) -> xr.Dataset:
    """Predict one step: the gradient of the mean loss over `images` whole images, and the update.

    Parameters
    ----------
    scene_shape : (height, width) of each image in pixels.
    train : batch (tiles run at once), halo, precision, recomputation and optimiser are looked at.
    gpus : one number, or several in any order.
    strategy : "sample-parallel": tiles dealt to ranks as `bigunet.sample_parallel` does;
        "halo-exchange": a block of each image a GPU, rows exchanged at every convolution (model
        only); "pipeline": one pipeline of all GPUs; "tiles-x-stages": pipelines side by side.
    tile : side of the tiles' cores in pixels; `train.tile` by default, or the image if smaller.
    images : images in a step; with `weak` for each GPU (weak scaling).
    cropped : whether decoders drop what no output pixel needs.
    stages : stages of a pipeline; by default all GPUs for "pipeline", those of a node for
        "tiles-x-stages".
    micro_batches : of a pipeline's pass; four a stage by default, or fewer where there are fewer.
    schedule : "gpipe" or "1f1b".
    cost : seconds of layers; the roofline of the machine's processor by default. A measured one
        holds for the tiles that it was measured with.
    all_reduce : "end": all gradients are summed when a rank is through, as bigunet does it;
        "overlapped": in DDP's buckets during the last tile's backward pass.
    algorithm : of the sums, see `bigunet.scaling.collective`; "auto" takes the fastest for each
        message, and "hierarchical" falls back to it where nodes are unevenly filled.
    pixel_bytes : bytes of a pixel of one band in the file.
    search : whether pipelines' cuts are searched for, or only balanced, which is quicker.

    Returns
    -------
    Dataset over `gpus`, with `seconds` (term, gpus), whose terms are explained at
    `bigunet.scaling.TERMS` and add up to `step_seconds`; `speedup` over one GPU with the same
    strategy, memory aside, and `efficiency`, that divided by the GPUs (weak scaling: the time of
    one GPU over that of all); `images_per_second`, `pixels_per_second`; `memory_bytes` of the
    fullest GPU and `capacity_bytes`; `feasible` and `reason`; `num_tiles`, `idle_gpus`,
    `idle_share`; `tile`, `stages`, `pipelines`, `micro_batches`; `link_bytes` (link, gpus) of the
    sums over ranks, `exchange_bytes`, `transfer_bytes`, `read_bytes`, all of the whole step;
    `gpu_hours` and `energy_joules` of a step. Units in attrs. A step that is infeasible for lack
    of memory has its seconds all the same; one that cannot be formed at all has inf.

    Raises
    ------
    PlanError : an unknown strategy or option, GPUs the machine does not have, numbers below 1.
    ShapeError : an image or a tile the network cannot take.
    """
    setting = Setting.of(
        spec, scene_shape, train, machine, cost=cost, images=images, weak=weak, cropped=cropped,
        schedule=schedule, all_reduce=all_reduce, algorithm=algorithm, pixel_bytes=pixel_bytes,
        search=search,
    )  # fmt: skip
    strategy = check_strategy(strategy)
    for name, value in (("stages", stages), ("micro_batches", micro_batches), ("tile", tile)):
        if value is not None and (type(value) is not int or value < 1):
            fail(
                PlanError,
                rule=f"{name} is a whole number >= 1, or left out",
                got=value,
                remedy="Change it.",
            )
    asked: Sequence[Any] = gpus if isinstance(gpus, Sequence | np.ndarray) else [gpus]
    numbers = [setting.check_gpus(_whole(n)) for n in asked]
    if not numbers:
        fail(PlanError, rule="at least one number of GPUs is asked for", got="none")
    parts: dict[str, Any] = {"tile": tile, "micro_batches": micro_batches}
    found = [evaluate(setting, strategy, n, num_stages=stages, **parts) for n in numbers]
    one = evaluate(setting, strategy, 1, num_stages=None if stages is None else 1, **parts)
    reasons = [_reason(setting, strategy, outcome) for outcome in found]
    return _dataset(setting, strategy, found, one, reasons)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, np.integer) else value


def _reason(setting: Setting, strategy: Strategy, outcome: Outcome) -> str:
    """Why not, or what else there is to say."""
    if not outcome.feasible:
        fits = what_fits(setting, strategy, outcome)
        return f"{outcome.reason}; {fits}" if fits else outcome.reason
    if outcome.idle_gpus:
        share = outcome.idle_gpus / outcome.gpus
        return f"{outcome.idle_gpus:,} of {outcome.gpus:,} GPUs idle ({100 * share:.0f} %)"
    return ""


def _dataset(
    setting: Setting,
    strategy: Strategy,
    found: Sequence[Outcome],
    one: Outcome,
    reasons: Sequence[str],
) -> xr.Dataset:
    machine, height, width = setting.machine, *setting.shape
    gpus = np.array([o.gpus for o in found])
    seconds = np.array([o.terms for o in found]).T
    step = seconds.sum(axis=0)
    images = np.array([setting.num_images(o.gpus) for o in found])
    with np.errstate(invalid="ignore"):
        gain = one.seconds / step
        speedup = gain * gpus if setting.weak else gain
        rate = images / step
    nodes = -(-gpus // machine.num_devices)
    watts = (machine.processor.watts or np.nan) * gpus + machine.overhead_watts * nodes

    def each(name: str, units: str = "") -> tuple[str, Any, dict[str, str]]:
        return "gpus", np.array([getattr(o, name) for o in found]), {"units": units or "1"}

    def of(values: Any, units: str) -> tuple[str, Any, dict[str, str]]:
        return "gpus", values, {"units": units}

    links = np.array([o.all_reduce_bytes for o in found]).T
    idle = np.array([o.idle_gpus for o in found])
    return xr.Dataset(
        {
            "seconds": (("term", "gpus"), seconds, {"units": "s"}),
            "step_seconds": of(step, "s"),
            "speedup": of(speedup, "1"),
            "efficiency": of(speedup / gpus, "1"),
            "images": of(images, "1"),
            "images_per_second": of(rate, "1/s"),
            "pixels_per_second": of(rate * height * width, "1/s"),
            "memory_bytes": each("memory_bytes", "byte"),
            "capacity_bytes": of(np.full(len(gpus), machine.processor.memory_bytes), "byte"),
            "feasible": ("gpus", np.array([o.feasible for o in found])),
            "reason": ("gpus", np.array(reasons, dtype=object)),
            "num_tiles": each("num_tiles"),
            "idle_gpus": of(idle, "1"),
            "idle_share": of(idle / gpus, "1"),
            "tile": each("tile", "pixel"),
            "stages": each("stages"),
            "pipelines": each("pipelines"),
            "micro_batches": each("micro_batches"),
            "link_bytes": (("link", "gpus"), links, {"units": "byte"}),
            "exchange_bytes": each("exchange_bytes", "byte"),
            "transfer_bytes": each("transfer_bytes", "byte"),
            "read_bytes": each("read_bytes", "byte"),
            "read_pixels": each("read_pixels", "pixel"),
            "gpu_hours": of(step * gpus / 3600, "h"),
            "energy_joules": (
                "gpus",
                step * watts,
                {"units": "J", "note": "an estimate: design power of all GPUs times the time"},
            ),
        },
        coords={"gpus": gpus, "term": list(TERMS), "link": list(LINKS)},
        attrs={
            "strategy": strategy,
            "scaling": "weak" if setting.weak else "strong",
            "machine": machine.name,
            "scene_shape": setting.shape,
            "images": setting.images,
            "one_gpu_seconds": one.seconds,
            "one_gpu_feasible": int(one.feasible),
            "schedule": setting.schedule,
            "all_reduce": setting.all_reduce,
            "algorithm": setting.algorithm,
            "num_parameters": setting.num_parameters,
            "assumptions": _assumptions(setting, strategy),
        },
    )


def _assumptions(setting: Setting, strategy: Strategy) -> str:
    machine = setting.machine
    if isinstance(setting.cost, RooflineCost):
        compute = (
            "seconds of layers: roofline (doi 10.1145/1498765.1498785) of "
            f"{machine.processor.name}, {machine.processor.source}; a bound that real kernels "
            "come near to"
        )
    else:
        compute = "seconds of layers: as measured"
    said = [
        compute,
        "sums over ranks: the fastest of ring, tree and hierarchical (bigunet.scaling.collective), "
        + ("after" if setting.all_reduce == "end" else "in DDP's buckets during")
        + " the backward pass",
        f"links: {machine.inside.name}, {machine.across.name}, {machine.network.name}; no other "
        "traffic on them",
        f"reading: {machine.file_system.name}, not hidden behind compute",
        "tiles are dealt as in bigunet; every pixel is labelled",
    ]
    if strategy == "halo-exchange":
        said.append("a model only: exchanges wait, corners are not counted, norms see one block")
    if strategy in ("pipeline", "tiles-x-stages"):
        said.append("stages cut by the planner for a step of these micro-batches")
    return "; ".join(said) + "."
