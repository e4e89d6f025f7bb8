"""What a machine is made of: a processor, links, a file system, and the node they form.

Each field says in its metadata what it means and which values it takes, so that the checks here,
those of machine files and the texts that people read come from one place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bigunet.errors import PlanError, fail

__all__ = ["FileSystem", "Link", "Machine", "Processor", "faults_of"]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rates(value: object) -> bool:
    if not isinstance(value, Mapping) or "fp32" not in value or set(value) - {"fp32", "bf16"}:
        return False
    return all(_number(v) and 0 < v < math.inf for v in value.values())


_RULES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "name": ("a text that is not empty", lambda v: isinstance(v, str) and bool(v.strip())),
    "text": ("a text", lambda v: isinstance(v, str)),
    "positive": ("a finite number > 0", lambda v: _number(v) and 0 < v < math.inf),
    "rate": ("a number > 0, .inf where it costs nothing", lambda v: _number(v) and v > 0),
    "not negative": ("a finite number >= 0", lambda v: _number(v) and 0 <= v < math.inf),
    "watts": ("a finite number > 0, or null", lambda v: v is None or (_number(v) and 0 < v < 1e6)),
    "count": ("a whole number >= 1", lambda v: type(v) is int and v >= 1),
    "flag": ("true or false", lambda v: isinstance(v, bool)),
    "rates": ("FLOP/s > 0 for fp32, and for bf16 if it has units for it", _rates),
    "scheduler": ("slurm, lsf or empty", lambda v: v in ("", "slurm", "lsf")),
    "part": ("a section of its own", dataclasses.is_dataclass),
    "part or none": ("a section, or null", lambda v: v is None or dataclasses.is_dataclass(v)),
}


def _says(rule: str, text: str) -> dict[str, str]:
    return {"rule": rule, "text": text}


def faults_of(kind: type[Any], values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(field, fault) of those `values` that break the rule of their field of `kind`."""
    for entry in dataclasses.fields(kind):
        if entry.name in values:
            said, holds = _RULES[entry.metadata["rule"]]
            if not holds(values[entry.name]):
                yield entry.name, f"{entry.name} is {said}, not {values[entry.name]!r}"
    share, all_of = values.get("per_socket"), values.get("num_devices")
    if type(share) is int and type(all_of) is int and share > all_of:
        yield "per_socket", f"per_socket is at most num_devices, {all_of}, not {share}"


class _Checked:
    __slots__ = ()

    def __post_init__(self) -> None:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        faults = [fault for _, fault in faults_of(type(self), values)]
        if faults:
            fail(
                PlanError,
                rule=f"{type(self).__name__} {values['name']}: {'; '.join(faults)}",
                remedy="Take the figures from the data sheet, or measure them.",
            )


@dataclass(frozen=True, slots=True)
class Processor(_Checked):
    """One accelerator, or the share of a CPU that one rank has.

    Raises
    ------
    PlanError : figures out of range; so do `Link`, `FileSystem` and `Machine`.
    """

    name: str = field(metadata=_says("name", "what it is called"))
    flops_per_second: Mapping[str, float] = field(
        metadata=_says(
            "rates", "peak FLOP/s of matrix products in fp32 and, where it has units for it, bf16"
        )
    )
    bytes_per_second: float = field(metadata=_says("positive", "peak rate of its memory, B/s"))
    memory_bytes: int = field(metadata=_says("count", "its whole memory, as its maker says, B"))
    launch_seconds: float = field(
        metadata=_says("not negative", "what starting one kernel costs, s"), default=0.0
    )
    source: str = field(metadata=_says("text", "where the figures come from"), default="")
    watts: float | None = field(
        metadata=_says("watts", "its thermal design power, W"), default=None
    )
    cuda: bool = field(
        metadata=_says("flag", "whether memory is allocated as on CUDA or ROCm"), default=True
    )

    def peak(self, precision: str) -> float:
        """FLOP/s of matrix products at a `TrainSpec.precision`; autocast multiplies in bf16.

        Without units for bf16 it runs at the rate of fp32.
        """
        rates = self.flops_per_second
        return rates["fp32"] if precision == "fp32" else rates.get("bf16", rates["fp32"])


@dataclass(frozen=True, slots=True)
class Link(_Checked):
    """One direction of a connection: `seconds(bytes) = latency + bytes / rate`."""

    name: str = field(metadata=_says("name", "what it is called"))
    bytes_per_second: float = field(metadata=_says("rate", "rate of one direction, B/s"))
    latency_seconds: float = field(
        metadata=_says("not negative", "what a message costs besides, s"), default=0.0
    )
    source: str = field(metadata=_says("text", "where the figures come from"), default="")
    by_processors: bool = field(
        metadata=_says("flag", "whether the processors at both ends copy, instead of working"),
        default=False,
    )


@dataclass(frozen=True, slots=True)
class FileSystem(_Checked):
    """Where images lie: what one node can read, and all nodes of a machine together."""

    name: str = field(metadata=_says("name", "what it is called"))
    node_bytes_per_second: float = field(
        metadata=_says("rate", "B/s that one node reads"), default=math.inf
    )
    total_bytes_per_second: float = field(
        metadata=_says("rate", "B/s of all nodes together"), default=math.inf
    )
    source: str = field(metadata=_says("text", "where the figures come from"), default="")


_FREE = Link("same device", math.inf)
_NO_FILES = FileSystem("not stated", source="no figure: reading is taken to cost nothing")


@dataclass(frozen=True)
class Machine(_Checked):
    """Nodes of devices 0 ... num_devices - 1, in groups that share a socket (or a package).

    `inside` joins two devices of one group, `across` two of different groups, `network` two of
    different nodes: device i is on node i // num_devices.
    """

    name: str = field(metadata=_says("name", "what it is called"))
    processor: Processor = field(metadata=_says("part", "each of its devices"))
    num_devices: int = field(metadata=_says("count", "devices of a node"))
    inside: Link = field(metadata=_says("part", "joins two devices of one group"))
    across: Link = field(metadata=_says("part", "joins two groups of a node"))
    network: Link = field(metadata=_says("part", "joins two devices of different nodes"))
    per_socket: int = field(metadata=_says("count", "devices of a group"), default=1)
    notes: str = field(metadata=_says("text", "anything else, with its source"), default="")
    injection_bytes_per_second: float = field(
        metadata=_says("rate", "B/s that all devices of a node together send to other nodes"),
        default=math.inf,
    )
    file_system: FileSystem = field(metadata=_says("part", "where images lie"), default=_NO_FILES)
    num_nodes: int = field(metadata=_says("count", "nodes at most"), default=1)
    scheduler: str = field(
        metadata=_says("scheduler", "batch system: slurm, lsf or none"), default=""
    )
    overhead_watts: float = field(
        metadata=_says(
            "not negative", "W of a node beside its devices; 0 where no source states it"
        ),
        default=0.0,
    )
    all_reduce: Link | None = field(
        metadata=_says(
            "part or none",
            "the link that explains timed all-reduces, by a ring, where that is known; it may be "
            "far slower than that of single messages",
        ),
        default=None,
    )

    def link(self, source: int, target: int) -> Link:
        """The link from one device to another."""
        if source == target:
            return _FREE
        if source // self.num_devices != target // self.num_devices:
            return self.network
        here, there = source % self.num_devices, target % self.num_devices
        return self.inside if here // self.per_socket == there // self.per_socket else self.across

    @property
    def max_devices(self) -> int:
        """Devices of all nodes."""
        return self.num_nodes * self.num_devices
