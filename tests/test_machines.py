"""Devices by name."""

from __future__ import annotations

import pytest

from bigunet.errors import SpecError
from bigunet.machines import DEVICES, device


def test_devices_are_found_by_name_in_any_case() -> None:
    for name, entry in DEVICES.items():
        assert device(name.lower()) is entry
        assert device(entry) is entry
        assert entry.source
    assert device("v100-16gb").memory_bytes == 16 * 2**30


def test_here_is_this_computers_memory() -> None:
    here = device("here")
    with open("/proc/meminfo", encoding="ascii") as file:
        total = int(file.readline().split()[1]) * 1024
    assert here.memory_bytes == total
    assert not here.cuda


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"V100-16GB.*here.*got 'abacus'"):
        device("abacus")
