"""`train`, `segment` and `score` end to end on a small synthetic scene, as a user runs them."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from bigunet.scenes import synthetic

SCENE = "synthetic:128x192:3"
NET = ["--levels", "3", "--channels", "4", "--classes", "5"]


def bigunet(*args, launcher=(sys.executable,), ok=True, cwd=None):
    done = subprocess.run(
        [*launcher, "-m", "bigunet", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode == 0) == ok, done.stderr
    return done


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    args = ["train", SCENE, "--out", folder, *NET, "--steps", 4, "--tile", 64, "--batch", 2]
    values = json.loads(bigunet(*args, "--val-image", SCENE, "--json").stdout)
    return folder, values


def test_training_reports_its_weights_and_scores(run):
    folder, values = run
    assert (folder / "weights.safetensors").exists()
    assert np.isfinite(values["loss"])
    assert 0 <= values["scores"]["mean_iou"] <= 1


def test_torchrun_with_two_ranks_sees_the_same_tiles_as_one(run, tmp_path):
    """The loss of the last step agrees to rounding, though the tiles are dealt to two ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    args = ["train", SCENE, "--out", tmp_path, *NET, "--steps", 4, "--tile", 64, "--batch", 2]
    values = json.loads(bigunet(*args, "--json", launcher=launcher).stdout)
    assert values["loss"] == pytest.approx(run[1]["loss"], rel=1e-4)


def test_a_mosaic_is_written_scored_and_opened_again(run, tmp_path):
    weights = run[0] / "weights.safetensors"
    out = tmp_path / "mosaic.zarr"
    args = ["segment", SCENE, "--weights", weights, "--out", out, "--precision", "fp32"]
    values = json.loads(bigunet(*args, "--json").stdout)
    assert (values["height"], values["width"], values["precision"]) == (128, 192, "fp32")
    again = json.loads(bigunet(*args, "--json").stdout)
    assert again["out"] == values["out"]
    scores = json.loads(bigunet("score", out, SCENE, "--leave-out", "water", "--json").stdout)
    truth = synthetic((128, 192), 3).labels.values
    assert scores["truth_pixels"] == np.bincount(truth.ravel(), minlength=5).tolist()
    assert sum(map(sum, scores["confusion"])) == truth.size
    assert 0 <= scores["mean_iou_kept"] <= 1


def test_a_plan_trains_the_same_on_two_ranks_as_in_one_process(tmp_path):
    plan = tmp_path / "plan.yaml"
    shape = ["--scene", SCENE, "--tile", 64, "--batch", 2, "--steps", 2]
    bigunet("stages", *NET, *shape, "--stages", 2, "--micro-batches", 2, "--out", plan)
    losses = {}
    for engine in ("distributed", "reference"):
        args = ["train", SCENE, "--plan", plan, "--engine", engine, "--out", tmp_path / engine]
        losses[engine] = json.loads(bigunet(*args, "--json").stdout)["loss"]
    assert losses["distributed"] == pytest.approx(losses["reference"], rel=1e-5)
    done = bigunet("simulate", plan, "--json")
    assert json.loads(done.stdout)["step_seconds"] > 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["train", SCENE, "--out", "r", "--plan", "missing.yaml"], "missing.yaml"),
        (["segment", "missing.png", "--out", "m.zarr"], "missing.png"),
        (["segment", "synthetic:12", "--out", "m.zarr"], "synthetic:HEIGHTxWIDTH"),
        (["segment", "earth:north", "--out", "m.zarr"], "earth:held-out"),
        (["segment", SCENE, "--out", "m.zarr", "--tile", "50"], "stride"),
        (["segment", SCENE, "--out", "m.gif"], "m.gif"),
        (["train", "missing.png", "--out", "r"], "--labels"),
        (["train", SCENE, "--out", "r", "--classes", "3"], "5 classes"),
        (["train", SCENE, "--out", "r", *NET, "--mean", "1,2,3"], "std"),
    ],
)
def test_bad_input_ends_with_status_2_and_leaves_nothing(run, tmp_path, args, says):
    if args[0] == "segment":
        args = [*args, "--weights", run[0] / "weights.safetensors"]
    done = bigunet(*args, ok=False, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
