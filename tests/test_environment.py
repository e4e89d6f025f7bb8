"""What a measurement carries along."""

from __future__ import annotations

import datetime

import torch

import bigunet
from bigunet.environment import cores, cpu_model, environment, version_of


def test_the_environment_names_this_machine_and_its_software() -> None:
    found = environment()
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["bigunet"] == bigunet.__version__
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        assert found["cpu"] == cpu_model()
        assert found["cpu"] in file.read()
    assert int(found["cores"]) == cores() >= 1
    day = datetime.datetime.fromisoformat(found["date"])
    assert abs(datetime.datetime.now(datetime.UTC) - day) < datetime.timedelta(minutes=1)


def test_a_distribution_that_is_not_there_has_no_version() -> None:
    assert version_of("no-such-distribution-of-ours") == ""
