"""Devices by name, for those who ask only how much memory they have."""

from __future__ import annotations

import os
from dataclasses import dataclass

from bigunet.errors import SpecError, fail
from bigunet.machines.known import PROCESSORS

__all__ = ["DEVICES", "Device", "device"]


@dataclass(frozen=True, slots=True)
class Device:
    """The memory of a processor, or of this computer. `memory_bytes` is all of it.

    A driver keeps some of it (a CUDA context takes a few hundred MB), and kernels need work
    space: leave room. `source` names where the figure comes from.
    """

    name: str
    memory_bytes: int
    cuda: bool
    source: str


DEVICES: dict[str, Device] = {
    p.name: Device(p.name, p.memory_bytes, p.cuda, p.source) for p in PROCESSORS.values()
}
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
    for entry in DEVICES.values():
        if entry.name.lower() == name.lower():
            return entry
    fail(
        SpecError,
        rule=f"a device is one of {', '.join([*DEVICES, 'here'])}",
        got=repr(name),
        remedy="Choose one of them, or give a budget in bytes.",
    )
