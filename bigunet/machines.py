"""Devices and how much memory they have."""

from __future__ import annotations

import os
from dataclasses import dataclass

from bigunet.errors import SpecError, fail

__all__ = ["DEVICES", "Device", "device"]

_GB = 1000**3
_GiB = 1024**3


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or this computer. `memory_bytes` is the whole memory, as its maker says.

    A driver keeps some of it (a CUDA context takes a few hundred MB), and kernels need work
    space: leave room. `source` names where the figure comes from.
    """

    name: str
    memory_bytes: int
    cuda: bool
    source: str


def _gpu(name: str, memory_bytes: int, source: str) -> Device:
    return Device(name, memory_bytes, True, source)


# GPU makers count a "GB" of HBM2 and GDDR5 as 2^30 bytes; the H200's 141 GB are 10^9.
_TABLE = (
    _gpu("V100-16GB", 16 * _GiB, "NVIDIA V100 datasheet: 16 GB HBM2"),
    _gpu("V100-32GB", 32 * _GiB, "NVIDIA V100 datasheet: 32 GB HBM2"),
    _gpu("P40", 24 * _GiB, "NVIDIA Tesla P40 datasheet: 24 GB GDDR5"),
    _gpu("A100-40GB", 40 * _GiB, "NVIDIA A100 datasheet: 40 GB HBM2"),
    _gpu("A100-80GB", 80 * _GiB, "NVIDIA A100 datasheet: 80 GB HBM2e"),
    _gpu("MI250X-GCD", 64 * _GiB, "AMD Instinct MI250X: 128 GB HBM2e, two dies of 64 GB"),
    _gpu("H200", 141 * _GB, "NVIDIA H200 datasheet: 141 GB HBM3e"),
)

DEVICES: dict[str, Device] = {entry.name: entry for entry in _TABLE}
"""Devices by name; "here" is made by `device`."""


def _here() -> Device:
    """This computer's main memory."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device("here", total, False, "the operating system: physical memory")


def device(name: str | Device) -> Device:
    """The device of this name, upper or lower case; "here" is this computer.

    Raises
    ------
    SpecError : for an unknown name.
    """
    if isinstance(name, Device):
        return name
    if name.lower() == "here":
        return _here()
    for entry in _TABLE:
        if entry.name.lower() == name.lower():
            return entry
    fail(
        SpecError,
        rule=f"a device is one of {', '.join([*DEVICES, 'here'])}",
        got=repr(name),
        remedy="Choose one of them, or give a budget in bytes.",
    )
