"""Measured scaling: the ranks do what training does, and stopping keeps what there is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bigunet.errors import SpecError
from bigunet.scaling_file import load_scaling, measured_curve
from bigunet.scaling_run import measure_scaling
from bigunet.spec import TrainSpec, UNetSpec

SPEC = UNetSpec(levels=2, channels=4, classes=3)
TRAIN = TrainSpec(tile=16)


def test_strong_and_weak_scaling_are_measured_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "strong.nc"
    table = measure_scaling(SPEC, TRAIN, (32, 32), (2, 1), rounds=2, out=path, progress=False)
    assert table.gpus.values.tolist() == [1, 2]
    assert (table.step_seconds.values > 0).all()
    assert table.num_tiles.values.tolist() == [4, 4]
    np.testing.assert_array_equal(load_scaling(path).step_seconds, table.step_seconds)
    assert measured_curve(table).speedup.values[0] == 1.0

    weak = measure_scaling(SPEC, TRAIN, (32, 32), (1,), images=3, weak=True, rounds=1)
    assert weak.images.values.tolist() == [3]
    assert weak.num_tiles.values.tolist() == [12]
    assert weak.attrs["kind"] == "weak"


@pytest.mark.alone
def test_more_work_takes_longer() -> None:
    """Sixteen times the pixels: at least four times the seconds."""
    spec = SPEC.replace(channels=8)
    small = measure_scaling(spec, TRAIN.replace(tile=64), (64, 64), (1,), rounds=3, progress=False)
    large = measure_scaling(spec, TRAIN.replace(tile=64), (256, 256), (1,), rounds=3,
                            progress=False)  # fmt: skip
    assert float(large.step_seconds.median()) > 4 * float(small.step_seconds.median())


def test_inside_a_world_its_first_ranks_are_measured(tmp_path: Path) -> None:
    """As in a batch allocation: torchrun starts the command on every rank."""
    path = tmp_path / "world.nc"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
         "--rdzv-endpoint=localhost:0", "-m", "bigunet", "scale", "--ranks", "1,2", "--levels", "2",
         "--channels", "4", "--tile", "16", "--height", "32", "--width", "32", "--rounds", "1",
         "--out", str(path), "--json", "--quiet"],
        capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"measured"') == 1  # one rank prints
    assert load_scaling(path).gpus.values.tolist() == [1, 2]


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "part.nc"
    process = subprocess.Popen(
        [sys.executable, "-m", "bigunet", "scale", "--ranks", "1", "--rounds", "100000",
         "--levels", "2", "--channels", "4", "--tile", "16", "--height", "32", "--width", "32",
         "--out", str(path), "--quiet"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    began = time.monotonic()
    while not path.exists() and process.poll() is None and time.monotonic() - began < 90:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=90)
    assert process.returncode == 130
    assert f"stopped; {path} has what was measured" in said
    seconds = load_scaling(path).step_seconds
    assert 1 <= int(seconds.notnull().sum()) < 100000


def test_bad_numbers_are_refused_before_anything_starts() -> None:
    with pytest.raises(SpecError, match="ranks are numbers >= 1"):
        measure_scaling(SPEC, TRAIN, (32, 32), (0, 1))
    with pytest.raises(SpecError, match="rounds is at least 1"):
        measure_scaling(SPEC, TRAIN, (32, 32), (1,), rounds=0)


def test_more_ranks_than_the_world_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SpecError, match="at most those of the world that was started, 2"):
        measure_scaling(SPEC, TRAIN, (32, 32), (1, 4))


def test_ranks_without_a_tile_are_said() -> None:
    with pytest.warns(UserWarning, match=r"2 ranks have 1 tiles: 1 of them \(50 %\) are idle"):
        table = measure_scaling(SPEC, TRAIN, (16, 16), (2,), rounds=1, progress=False)
    assert table.idle_gpus.values.tolist() == [1]
