"""Machines: figures with sources, links by topology, files with lines, bad figures refused."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from bigunet.errors import PlanError, SpecError
from bigunet.machines import (
    DEVICES,
    MACHINES,
    PROCESSORS,
    FileSystem,
    Link,
    Machine,
    Processor,
    device,
    load_machine,
    machine,
    machine_yaml,
    save_machine,
)

# What is known by name ------------------------------------------------------------------------


def test_every_figure_states_its_source() -> None:
    for processor in PROCESSORS.values():
        assert re.search(r"data sheet \(\d{4}\)", processor.source)
        assert f"{processor.watts:.0f} W" in processor.source or "GCD" in processor.name or (
            processor.name in ("V100-32GB", "A100-80GB")  # as the one with less memory
        )  # fmt: skip
    for model in MACHINES.values():
        for link in (model.inside, model.across, model.network):
            assert link.source
        assert model.file_system.source
        assert model.notes or model.num_nodes == 1


def test_summit_links_follow_its_sockets_and_nodes() -> None:
    summit = machine("summit")
    assert summit.num_devices == 6
    assert summit.max_devices == 27_648
    assert summit.link(0, 0).bytes_per_second == math.inf
    assert summit.link(0, 2).name == summit.link(4, 3).name == "NVLink2"
    assert summit.link(2, 3).name == "X-bus"
    assert "InfiniBand" in summit.link(5, 6).name


def test_frontier_pairs_the_dies_of_a_package() -> None:
    frontier = machine("Frontier")
    assert frontier.link(0, 1).bytes_per_second == 200e9
    assert frontier.link(1, 2).bytes_per_second == 50e9
    assert frontier.link(7, 8).name == "Slingshot 11"
    # Two dies make one MI250X: AMD states 383 TFLOP/s of bf16 and 128 GB for it.
    assert 2 * frontier.processor.peak("bf16") == 383e12
    assert 2 * frontier.processor.memory_bytes == 128 * 2**30


def test_peaks_by_precision() -> None:
    a100 = machine("perlmutter").processor
    assert a100.peak("bf16") == a100.peak("bf16-autocast") == 312e12
    assert machine("p40").processor.peak("fp32") == pytest.approx(3840 * 2 * 1.531e9, rel=1e-3)
    v100 = machine("summit").processor
    assert v100.peak("bf16") == v100.peak("fp32") == pytest.approx(5120 * 2 * 1.53e9, rel=3e-3)


def test_power_adds_up_to_the_makers_figure() -> None:
    h200 = machine("h200")
    assert h200.processor.watts is not None
    assert h200.num_devices * h200.processor.watts + h200.overhead_watts == 10_200


# Devices --------------------------------------------------------------------------------------


def test_devices_are_the_processors_memory() -> None:
    assert set(DEVICES) == set(PROCESSORS)
    for name, entry in DEVICES.items():
        assert device(name.lower()) is entry
        assert device(entry) is entry
        assert entry.memory_bytes == PROCESSORS[name].memory_bytes
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


# Files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MACHINES)
def test_a_file_gives_the_machine_back(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    save_machine(machine(name), path)
    assert machine(path) == load_machine(path) == machine(name)


rates = st.floats(1e-3, 1e18)
letters = st.characters(codec="utf-8", exclude_categories=("C", "Z"))
names = st.text(letters, min_size=1).map("a #: {}".format)


@settings(max_examples=30, deadline=None)
@given(
    link=st.builds(Link, names, rates | st.just(math.inf), st.floats(0, 10), names),
    processor=st.builds(
        Processor, names, st.fixed_dictionaries({"fp32": rates}, optional={"bf16": rates}),
        rates, st.integers(1, 2**50), st.floats(0, 1), names, st.none() | st.floats(1, 1000),
    ),
    files=st.builds(FileSystem, names, rates, rates, names),
    nodes=st.integers(1, 10**6),
)  # fmt: skip
def test_any_machine_survives_its_text(
    link: Link, processor: Processor, files: FileSystem, nodes: int, tmp_path_factory: object
) -> None:
    value = Machine("m", processor, 2, link, link, link, 2, file_system=files, num_nodes=nodes)
    path = tmp_path_factory.getbasetemp() / "any.yaml"  # type: ignore[attr-defined]
    path.write_text(machine_yaml(value), encoding="utf-8")
    assert load_machine(path) == value


SHORT = """\
machine_file: 1
name: mine
processor: A100-80GB
num_devices: 4
per_socket: 4
inside:
  name: NVLink
  bytes_per_second: 1e11
network:
  name: Ethernet
  bytes_per_second: 1.25e+9
  latency_seconds: 2e-5
"""


def test_a_short_file_takes_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mine.yml"
    path.write_text(SHORT, encoding="utf-8")
    mine = machine(str(path))
    assert mine.processor is PROCESSORS["A100-80GB"]
    assert mine.inside == mine.across == Link("NVLink", 1e11)  # YAML 1.1 reads 1e11 as a text
    assert mine.network.latency_seconds == 2e-5
    assert (mine.num_nodes, mine.scheduler, mine.overhead_watts) == (1, "", 0.0)


@pytest.mark.parametrize(
    ("old", "new", "faults"),
    [
        ("machine_file: 1", "machine_file: 2", [r"line 1: machine_file is 1.*not 2"]),
        ("machine_file: 1\n", "", ["line 1: machine_file is 1.*not None"]),
        ("num_devices: 4", "num_devices: four", [r"line 4: num_devices is a whole number >= 1"]),
        ("num_devices: 4\n", "", ["line 1: num_devices is missing: devices of a node"]),
        ("num_devices: 4", "num_devices: 2", ["line 5: per_socket is at most num_devices, 2"]),
        ("1.25e+9", "-1", [r"line 11: bytes_per_second is a number > 0.*not -1"]),
        ("name: Ethernet", "nmae: Ethernet", ["line 10: nmae is no field; known are name",
                                              "line 10: name is missing"]),
        ("A100-80GB", "A100-90GB", ["line 3: processor is a section of fields, or one of V100"]),
        ("name: mine", "name: mine\nname: yours", ["line 3: name is given twice"]),
        ("per_socket: 4", "per_socket: 4\nscheduler: pbs", ["line 6: scheduler is slurm, lsf"]),
        (SHORT, "- 1\n- 2\n", ["line 1: a machine file holds fields"]),
        (SHORT, "", ["line 1: a machine file holds fields"]),
        # Every fault at once, not the first only.
        ("4\nper_socket: 4", "0\nper_socket: no", ["line 4: num_devices", "line 5: per_socket"]),
    ],
)  # fmt: skip
def test_a_malformed_file_is_refused_with_line_and_field(
    old: str, new: str, faults: list[str], tmp_path: Path
) -> None:
    assert old in SHORT
    path = tmp_path / "mine.yaml"
    path.write_text(SHORT.replace(old, new), encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        load_machine(path)
    for fault in faults:
        assert re.search(fault, str(caught.value)), str(caught.value)
    assert "mine.yaml" in str(caught.value)


def test_a_file_is_read_by_the_safe_loader(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SHORT.replace("mine", "!!python/name:os.system", 1), encoding="utf-8")
    with pytest.raises(PlanError, match="line 2"):
        load_machine(path)
    path.write_text("a: [1", encoding="utf-8")
    with pytest.raises(PlanError, match="line 1"):
        load_machine(path)
    with pytest.raises(PlanError, match="readable YAML file"):
        load_machine(tmp_path / "none.yaml")


def test_the_text_says_its_version() -> None:
    assert yaml.safe_load(machine_yaml(machine("summit")))["machine_file"] == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: machine("crystal ball"),
        lambda: Link("bad", 0.0),
        lambda: Link("bad", 1.0, -1.0),
        lambda: Link("", 1.0),
        lambda: FileSystem("bad", math.nan),
        lambda: Processor("bad", {"fp32": 0.0}, 1.0, 1, 0.0, ""),
        lambda: Processor("bad", {"bf16": 1.0}, 1.0, 1, 0.0, ""),
        lambda: Processor("bad", {"fp32": 1.0}, math.inf, 1, 0.0, ""),
        lambda: dataclasses.replace(machine("summit"), per_socket=7),
        lambda: dataclasses.replace(machine("summit"), scheduler="pbs"),
    ],
)
def test_bad_figures_are_refused(make: object) -> None:
    with pytest.raises(PlanError):
        make()  # type: ignore[operator]
