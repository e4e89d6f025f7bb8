"""Machines: processors, links, nodes and file systems, with the source of every figure.

`machine("summit")` is a known one, `machine("mine.yaml")` one's own; `device("V100-16GB")` is what
the memory model needs of a processor. This computer's own figures are timed by
`bigunet.here.here`, which needs torch.
"""

from __future__ import annotations

from bigunet.machines.devices import DEVICES, Device, device
from bigunet.machines.files import load_machine, machine, machine_yaml, pick, save_machine
from bigunet.machines.known import MACHINES, PROCESSORS
from bigunet.machines.parts import FileSystem, Link, Machine, Processor

__all__ = [
    "DEVICES",
    "MACHINES",
    "PROCESSORS",
    "Device",
    "FileSystem",
    "Link",
    "Machine",
    "Processor",
    "device",
    "load_machine",
    "machine",
    "machine_yaml",
    "pick",
    "save_machine",
]
