"""Machine models: figures with sources, links by topology, bad figures refused."""

from __future__ import annotations

import math

import pytest

from bigunet.errors import PlanError
from bigunet.hardware import MACHINES, Link, Processor, machine


def test_every_machine_states_its_sources() -> None:
    for model in MACHINES.values():
        assert model.processor.source
        for link in (model.inside, model.across, model.network):
            assert link.source
            assert link.bytes_per_second > 0


def test_summit_links_follow_its_sockets_and_nodes() -> None:
    summit = machine("summit")
    assert summit.num_devices == 6
    assert summit.link(0, 0).bytes_per_second == math.inf
    assert summit.link(0, 2).name == summit.link(4, 3).name == "NVLink2"
    assert summit.link(2, 3).name == "X-bus"
    assert "InfiniBand" in summit.link(5, 6).name


def test_peaks_by_precision() -> None:
    a100 = machine("perlmutter").processor
    assert a100.peak("bf16") == a100.peak("bf16-autocast") == 312e12
    assert machine("p40").processor.peak("fp32") == pytest.approx(3840 * 2 * 1.531e9, rel=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: machine("crystal ball"),
        lambda: Link("bad", 0.0),
        lambda: Link("bad", 1.0, -1.0),
        lambda: Processor("bad", {"fp32": 0.0}, 1.0, 1, 0.0, ""),
        lambda: Processor("bad", {"fp32": 1.0}, math.inf, 1, 0.0, ""),
    ],
)
def test_bad_figures_are_refused(make: object) -> None:
    with pytest.raises(PlanError):
        make()  # type: ignore[operator]
