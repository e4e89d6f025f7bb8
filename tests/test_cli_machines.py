"""`bigunet machines` and `bigunet scale` from the outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bigunet.machines import MACHINES, load_machine, machine
from bigunet.scaling import predict
from bigunet.spec import TrainSpec, UNetSpec


def bigunet(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bigunet", *args], capture_output=True, text=True, timeout=100
    )


def test_machines_are_listed_with_their_figures() -> None:
    listed = json.loads(bigunet("machines", "--json").stdout)["machines"]
    assert [entry["name"] for entry in listed] == list(MACHINES)
    assert listed[0]["processor"]["flops_per_second"]["fp32"] == 15.7e12
    text = bigunet("machines", "frontier").stdout
    assert "OLCF Frontier user guide" in text
    assert "9,856" in text


def test_a_machine_file_starts_from_a_printed_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = bigunet("machines", "summit", "--yaml").stdout
    path.write_text(text.replace("name: summit", "name: mine"), encoding="utf-8")
    assert load_machine(path).num_nodes == 4608
    done = bigunet("stages", "--machine", str(path), "--levels", "3", "--channels", "8",
                   "--batch", "2", "--json")  # fmt: skip
    assert json.loads(done.stdout)["plan"]["machine"] == "mine"
    path.write_text(text.replace("num_devices: 6", "num_devices: six"), encoding="utf-8")
    done = bigunet("stages", "--machine", str(path))
    assert done.returncode == 2
    assert "num_devices is a whole number" in done.stderr
    assert "line " in done.stderr


def test_a_prediction_is_the_models() -> None:
    done = bigunet("scale", "--gpus", "1,6,96", "--machine", "summit", "--height", "2048",
                   "--width", "2048", "--tile", "256", "--levels", "4", "--channels", "32",
                   "--json")  # fmt: skip
    rows = json.loads(done.stdout)["predicted"]
    expected = predict(
        UNetSpec(levels=4, channels=32), (2048, 2048), TrainSpec(tile=256), machine("summit"),
        [1, 6, 96], "sample-parallel",
    )  # fmt: skip
    for name in ("step_seconds", "speedup", "num_tiles", "idle_gpus"):
        assert [row[name] for row in rows] == pytest.approx(expected[name].values.tolist())
    for row in rows:
        assert sum(row["terms_seconds"].values()) == pytest.approx(row["step_seconds"])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--gpus", "1,many"), "gpus are numbers with commas between"),
        (("--gpus", "4", "--machine", "atlantis"), "a machine is one of summit"),
        (("--ranks", "0"), "ranks are numbers >= 1"),
        (("--gpus", "9", "--machine", "p40"), "GPUs are 1 to 8 on p40"),
    ],
)
def test_bad_input_is_said(args: tuple[str, ...], says: str) -> None:
    done = bigunet("scale", *args)
    assert done.returncode == 2
    assert says in done.stderr
