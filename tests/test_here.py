"""This machine's own figures: in proportion with torch's, remembered, and renewed on request."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch

from bigunet.errors import SpecError
from bigunet.here import cache_file, here, time_link
from bigunet.machines import load_machine


@pytest.mark.alone
def test_here_is_timed_in_time_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    began = time.perf_counter()
    machine = here(2)
    assert time.perf_counter() - began < 20
    assert (machine.num_devices, machine.max_devices) == (2, 2)

    # A product of another size, timed here, comes near the rate that is stated.
    torch.set_num_threads(1)
    a = torch.randn(768, 768)
    seconds = []
    for _ in range(9):
        began = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - began)
    measured = 2 * 768**3 / sorted(seconds)[4]
    assert 0.4 < machine.processor.peak("fp32") / measured < 2.5

    assert 1e6 < machine.link(0, 1).bytes_per_second < 1e12
    assert machine.all_reduce is not None
    # A sum over ranks moves bytes there and back, and adds: it is no faster than a message.
    assert machine.all_reduce.bytes_per_second < 1.5 * machine.link(0, 1).bytes_per_second
    assert machine.file_system.node_bytes_per_second > 1e6
    assert not machine.processor.cuda

    path = cache_file(2, 1)
    assert path.is_relative_to(tmp_path)
    assert load_machine(path) == machine
    began = time.perf_counter()
    assert here(2) == machine
    assert time.perf_counter() - began < 0.5
    assert here(2, refresh=True) != machine


def test_a_damaged_file_is_timed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_file(1, 1)
    path.parent.mkdir()
    path.write_text("machine_file: 1\nname: here\n", encoding="utf-8")
    machine = here(1)
    assert load_machine(path) == machine
    assert machine.all_reduce is None
    assert machine.link(0, 1).bytes_per_second == math.inf  # there is no other rank


def test_the_cache_tells_ranks_and_threads_apart() -> None:
    assert len({cache_file(1, 1), cache_file(2, 1), cache_file(1, 2)}) == 3


def test_a_link_between_two_ranks() -> None:
    link = time_link(sizes_bytes=(2**12, 2**20), rounds=3)
    assert 1e6 < link.bytes_per_second < 1e12
    assert 0 <= link.latency_seconds < 1


def test_no_rank_at_all() -> None:
    with pytest.raises(SpecError, match="at least one rank"):
        here(0)
