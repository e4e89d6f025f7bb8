"""Processors, the links between them, and the nodes they make: figures from the vendors.

A figure here is what a data sheet states, so a prediction built on it is a bound that real code
comes near to; seconds of one's own machine come from calibration (`bigunet.cost.MeasuredCost`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from bigunet.errors import PlanError, fail

__all__ = ["MACHINES", "Link", "Machine", "Processor", "machine"]

_SAME_DEVICE = "same device"


@dataclass(frozen=True, slots=True)
class Processor:
    """One accelerator. Rates are peaks; `launch_seconds` is what starting one kernel costs."""

    name: str
    flops_per_second: Mapping[str, float]
    bytes_per_second: float
    memory_bytes: int
    launch_seconds: float
    source: str

    def __post_init__(self) -> None:
        values = [*self.flops_per_second.values(), self.bytes_per_second, self.memory_bytes]
        if min(values) <= 0 or self.launch_seconds < 0 or not math.isfinite(sum(values)):
            fail(
                PlanError,
                rule=f"{self.name}: rates and memory are positive, launch_seconds is >= 0",
                got=(*values, self.launch_seconds),
                remedy="Take the figures from the data sheet.",
            )

    def peak(self, precision: str) -> float:
        """FLOP/s of matrix products at a `TrainSpec.precision`; autocast multiplies in bf16."""
        return self.flops_per_second["fp32" if precision == "fp32" else "bf16"]


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a connection: `seconds(bytes) = latency + bytes / rate`."""

    name: str
    bytes_per_second: float
    latency_seconds: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        if not (self.bytes_per_second > 0 and self.latency_seconds >= 0):
            fail(
                PlanError,
                rule=f"link {self.name}: bytes_per_second > 0 and latency_seconds >= 0",
                got=(self.bytes_per_second, self.latency_seconds),
                remedy="Use math.inf for a link that costs nothing.",
            )


@dataclass(frozen=True)
class Machine:
    """A node: devices 0 ... num_devices - 1 in groups that share a socket.

    `inside` joins two devices of one socket, `across` two of different sockets, `network` two of
    different nodes (devices from `num_devices` on are on the next nodes).
    """

    name: str
    processor: Processor
    num_devices: int
    inside: Link
    across: Link
    network: Link
    per_socket: int = 1
    notes: str = ""
    _free: Link = field(default=Link(_SAME_DEVICE, math.inf), repr=False, compare=False)

    def link(self, source: int, target: int) -> Link:
        """The link from one device to another."""
        if source == target:
            return self._free
        if source // self.num_devices != target // self.num_devices:
            return self.network
        here, there = source % self.num_devices, target % self.num_devices
        return self.inside if here // self.per_socket == there // self.per_socket else self.across


# What starting a kernel costs in a stream of them: NVIDIA, "Getting Started with CUDA Graphs"
# (developer.nvidia.com/blog/cuda-graphs, 2019): 3.8 us a kernel of 2.9 us on a V100, launches
# overlapped. Vendors state no figure of their own for the others.
_LAUNCH = 4e-6
_GB = 1e9

V100 = Processor(
    "V100 SXM2 16 GB",
    # Volta has no bf16 units: bf16 runs at the fp32 rate.
    {"fp32": 15.7e12, "bf16": 15.7e12},
    900 * _GB,
    16 * 2**30,
    _LAUNCH,
    "NVIDIA V100 data sheet (2020): 15.7 TFLOP/s fp32 (NVLink), 900 GB/s",
)
P40 = Processor(
    "Tesla P40",
    {"fp32": 11.76e12, "bf16": 11.76e12},
    346 * _GB,
    24 * 2**30,
    _LAUNCH,
    "NVIDIA Tesla P40 data sheet (2016): 12 TFLOP/s (3840 cores x 2 x 1.531 GHz), 346 GB/s",
)
A100 = Processor(
    "A100 SXM4 40 GB",
    # PyTorch's convolutions use TF32 by default on this generation.
    {"fp32": 156e12, "bf16": 312e12},
    1555 * _GB,
    40 * 2**30,
    _LAUNCH,
    "NVIDIA A100 data sheet (2021): TF32 156, bf16 312 TFLOP/s, 1555 GB/s",
)
H200 = Processor(
    "H200 SXM",
    {"fp32": 494.5e12, "bf16": 989.5e12},
    4800 * _GB,
    141 * 10**9,
    _LAUNCH,
    "NVIDIA H200 data sheet (2024): TF32 989, bf16 1979 TFLOP/s with sparsity (half dense), "
    "4.8 TB/s, 141 GB",
)

_PCIE3 = Link("PCIe 3.0 x16", 15.75 * _GB, 5e-6, "PCI-SIG: 8 GT/s x 16 lanes, 128b/130b")
_EDR2 = Link("dual-rail EDR InfiniBand", 25 * _GB, 1.5e-6, "Mellanox EDR: 100 Gbit/s a rail")

MACHINES: Mapping[str, Machine] = {
    "summit": Machine(
        "summit",
        V100,
        6,
        Link("NVLink2", 50 * _GB, 5e-6, "OLCF Summit guide: two 25 GB/s bricks each way"),
        Link("X-bus", 64 * _GB / 2, 1e-5, "OLCF Summit guide: 64 GB/s X-bus, both ways together"),
        _EDR2,
        per_socket=3,
        notes="OLCF Summit user guide: 6 V100 a node, 3 a socket; decommissioned in 2024.",
    ),
    "p40": Machine("p40", P40, 8, _PCIE3, _PCIE3, _EDR2, per_socket=8),
    "perlmutter": Machine(
        "perlmutter",
        A100,
        4,
        Link("NVLink3", 100 * _GB, 5e-6, "NERSC: four third-generation links a pair of GPUs"),
        Link("NVLink3", 100 * _GB, 5e-6, "NERSC: four third-generation links a pair of GPUs"),
        Link("Slingshot 11", 25 * _GB, 2e-6, "NERSC: four 25 GB/s cards a node, one a GPU"),
        per_socket=4,
    ),
    "h200": Machine(
        "h200",
        H200,
        8,
        Link("NVLink4", 450 * _GB, 5e-6, "NVIDIA H200 data sheet: 900 GB/s both ways together"),
        Link("NVLink4", 450 * _GB, 5e-6, "NVIDIA H200 data sheet: 900 GB/s both ways together"),
        Link("NDR InfiniBand", 50 * _GB, 1.5e-6, "NVIDIA NDR: 400 Gbit/s a port"),
        per_socket=8,
    ),
}


def machine(name: str) -> Machine:
    """A machine by name.

    Raises
    ------
    PlanError : for an unknown name.
    """
    if name not in MACHINES:
        fail(
            PlanError,
            rule=f"a machine is one of {', '.join(MACHINES)}",
            got=name,
            remedy="Choose one, or build a `Machine`.",
        )
    return MACHINES[name]
