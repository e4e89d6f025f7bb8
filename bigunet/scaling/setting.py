"""What is to be run, and what comes out for one number of GPUs: the values strategies share."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from bigunet.cost import CostModel, RooflineCost
from bigunet.errors import PlanError, fail
from bigunet.layers import count_parameters
from bigunet.machines import Device, Machine
from bigunet.plan import Schedule
from bigunet.scaling.collective import Algorithm, Members, Sum, sum_over
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import check_image

__all__ = [
    "STRATEGIES",
    "TERMS",
    "AllReduce",
    "Outcome",
    "Setting",
    "Strategy",
    "misfit",
    "sum_of",
    "terms_of",
    "unfit",
]

Strategy = Literal["sample-parallel", "halo-exchange", "pipeline", "tiles-x-stages"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
AllReduce = Literal["end", "overlapped"]
TERMS = (
    "compute",
    "halo redundancy",
    "imbalance",
    "update",
    "all-reduce",
    "halo exchange",
    "bubble",
    "transfers",
    "reading",
)
"""Parts of a step, which add up to it. compute: the tiles without their halos, shared out evenly;
halo redundancy: what their halos add; imbalance: what the slowest GPU has above the mean; update:
the optimiser; all-reduce: the part that no backward pass hides; halo exchange: rows of every
convolution's input; bubble: the idle time of a schedule of equal stages; transfers: what sending
between stages adds; reading: tiles from the file system."""


@dataclass(frozen=True, eq=False)
class Setting:
    """A network, its training, an image and a machine; arguments as `bigunet.scaling.predict`.

    `memo` keeps what predictions share that have network, training, machine and cost in common.
    """

    spec: UNetSpec
    shape: tuple[int, int]
    train: TrainSpec
    machine: Machine
    cost: CostModel
    images: int = 1
    weak: bool = False
    cropped: bool = True
    schedule: Schedule = "gpipe"
    all_reduce: AllReduce = "end"
    algorithm: Algorithm = "auto"
    pixel_bytes: float = 1.0
    search: bool = True
    memo: dict[object, object] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        spec: UNetSpec,
        shape: tuple[int, int],
        train: TrainSpec,
        machine: Machine,
        *,
        cost: CostModel | None = None,
        images: int = 1,
        weak: bool = False,
        cropped: bool = True,
        schedule: Schedule = "gpipe",
        all_reduce: AllReduce = "end",
        algorithm: Algorithm = "auto",
        pixel_bytes: float = 1.0,
        search: bool = True,
    ) -> Setting:
        """A checked setting; the roofline of the machine's processor is the default cost.

        Raises
        ------
        PlanError : for options that are not known, fewer than one image, or negative sizes.
        ShapeError : for an image the network cannot take.
        """
        faults = []
        for name, value, known in (
            ("schedule", schedule, get_args(Schedule)),
            ("all_reduce", all_reduce, get_args(AllReduce)),
            ("algorithm", algorithm, get_args(Algorithm)),
        ):
            if value not in known:
                faults.append(f"{name} is one of {', '.join(known)}, not {value!r}")
        if not _whole(images):
            faults.append(f"images is a whole number >= 1, not {images!r}")
        if not pixel_bytes >= 0:
            faults.append(f"pixel_bytes is >= 0, not {pixel_bytes!r}")
        if len(shape) != 2 or not all(_whole(n) for n in shape):
            faults.append(f"scene_shape is (height, width) in pixels, each >= 1, not {shape!r}")
        if faults:
            fail(
                PlanError, rule="a prediction: " + "; ".join(faults), remedy="Change these values."
            )
        check_image(shape, spec)
        if cost is None:
            cost = RooflineCost(machine.processor, train.precision)
        return cls(
            spec, (int(shape[0]), int(shape[1])), train, machine, cost, images, weak, cropped,
            schedule, all_reduce, algorithm, pixel_bytes, search,
            _memo((spec, train, frozen(machine), frozen(cost), cropped, schedule)),
        )  # fmt: skip

    @property
    def device(self) -> Device:
        """The processor as the memory model knows it."""
        p = self.machine.processor
        return Device(p.name, p.memory_bytes, p.cuda, p.source)

    def num_images(self, gpus: int) -> int:
        """Images in a step on so many GPUs."""
        return self.images * (gpus if self.weak else 1)

    def check_gpus(self, gpus: int) -> int:
        """`gpus`; raises `PlanError` for less than one, or more than the machine has."""
        most = self.machine.max_devices
        if not _whole(gpus) or gpus > most:
            fail(
                PlanError,
                rule=f"GPUs are 1 to {most:,} on {self.machine.name} "
                f"({self.machine.num_nodes:,} nodes of {self.machine.num_devices})",
                got=gpus,
                remedy="Ask for fewer, or describe a larger machine (num_nodes).",
            )
        return int(gpus)

    def update_seconds(self, num_parameters: int) -> float:
        """The optimiser's pass over so many parameters, bound by memory.

        Numbers of 4 bytes read and written for each parameter: SGD 3 (weight, gradient, weight),
        momentum 5, Adam 7; an averaged copy 3 more (`torch.optim`, fused).
        """
        each = {"sgd": 3, "momentum": 5, "adam": 7, "adamw": 7}[self.train.optimiser]
        each += 3 * (self.train.average > 0)
        return 4.0 * each * num_parameters / self.machine.processor.bytes_per_second

    @property
    def num_parameters(self) -> int:
        """Trained weights of the network."""
        if "parameters" not in self.memo:
            self.memo["parameters"] = count_parameters(self.spec)
        return cast(int, self.memo["parameters"])


_MEMOS: OrderedDict[object, dict[object, object]] = OrderedDict()
_MOST_MEMOS = 256


def _memo(key: object) -> dict[object, object]:
    """What earlier predictions with this key left; the oldest are forgotten."""
    try:
        memo = _MEMOS.setdefault(key, {})
    except TypeError:  # a cost model of one's own that cannot be a key
        return {}
    _MEMOS.move_to_end(key)
    if len(_MEMOS) > _MOST_MEMOS:
        _MEMOS.popitem(last=False)
    return memo


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """One prediction. `terms` are the seconds of `TERMS`; bytes are of all GPUs and one step.

    `idle_gpus` of the GPUs have nothing to do. `feasible` says whether it can be run at all:
    memory, stages, blocks; `reason` why not.
    """

    gpus: int
    terms: tuple[float, ...]
    memory_bytes: int
    feasible: bool = True
    reason: str = ""
    idle_gpus: int = 0
    num_tiles: int = 1
    tile: int = 0
    stages: int = 1
    pipelines: int = 1
    micro_batches: int = 1
    all_reduce_bytes: tuple[float, float, float] = (0.0, 0.0, 0.0)
    exchange_bytes: float = 0.0
    transfer_bytes: float = 0.0
    read_bytes: float = 0.0
    read_pixels: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(self.terms)


def frozen(value: Any) -> Any:
    """A key that equal values share, also where they hold mappings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return (type(value), *(frozen(getattr(value, f.name)) for f in fields))
    if isinstance(value, Mapping):
        return tuple(sorted((k, frozen(v)) for k, v in value.items()))
    return value


def terms_of(**seconds: float) -> tuple[float, ...]:
    """Seconds in the order of `TERMS`, names with underscores; those not named are 0."""
    return tuple(seconds.get(name.replace(" ", "_").replace("-", "_"), 0.0) for name in TERMS)


def sum_of(setting: Setting, members: Members, num_bytes: int, sharing: int = 1) -> Sum:
    """`sum_over` on the setting's machine by its algorithm, each sum worked out once."""
    key = ("sum", members, num_bytes, setting.algorithm, sharing)
    if key not in setting.memo:
        setting.memo[key] = sum_over(
            members, setting.machine, num_bytes, setting.algorithm, sharing
        )
    return cast(Sum, setting.memo[key])


def unfit(gpus: int, memory_bytes: int, reason: str, **fields: Any) -> Outcome:
    """The outcome of what cannot be run, not timed."""
    return Outcome(
        gpus, terms_of(compute=math.inf), memory_bytes, feasible=False, reason=reason, **fields
    )


def misfit(need: float, have: float) -> str:
    """What is said of memory that does not do."""
    return f"needs {need / 2**30:.1f} GiB of {have / 2**30:.1f} GiB"
