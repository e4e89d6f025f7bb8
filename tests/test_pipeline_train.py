"""Training by a plan against sample-parallel training, and that it goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pipeline_ranks import fitted_plan, on_ranks, scene, scene_pair

from bigunet.checkpoint import load_weights
from bigunet.errors import CheckpointError
from bigunet.evaluate import evaluate
from bigunet.pipeline import run_plan, train_plan
from bigunet.plan import Plan
from bigunet.run_folder import plain_scores
from bigunet.tile_reader import TileReader
from bigunet.train import fit


def history(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    rows = [row for row in history(folder) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def test_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    """2 x 2 ranks, stopped in between, against `fit`: losses, norms and weights in fp32.

    Rounding differs (layout, order of sums) and Adam divides small gradients by small numbers.
    """
    ranks_folder = on_ranks(4)["folder"] / "ranks"
    plan = fitted_plan()
    fit(plan.spec, scene_pair(), plan.train, out=tmp_path / "fit", mode="whole", progress=False)
    one = tmp_path / "reference"
    train_plan(plan, scene_pair(), one, engine="reference", progress=False)
    want = load_weights(tmp_path / "fit" / "weights.safetensors")
    for folder in (ranks_folder, one):
        assert losses(folder) == pytest.approx(losses(tmp_path / "fit"), rel=1e-4)
        got = load_weights(folder / "weights.safetensors")
        assert got.spec == want.spec
        assert got.normalise == want.normalise
        values = got.model.state_dict()
        for key, tensor in want.model.state_dict().items():
            if tensor.is_floating_point():
                torch.testing.assert_close(values[key], tensor, rtol=5e-3, atol=2e-4)


def test_it_is_scored_on_its_way(tmp_path: Path) -> None:
    """As `fit` scores its averaged weights, of which no rank has all; a few pixels may flip."""
    plan, pair = fitted_plan(), scene_pair()
    scored: dict[str, Any] = {"val": pair, "validate_every": 2, "progress": False}
    fit(plan.spec, pair, plan.train, out=tmp_path / "fit", mode="whole", **scored)
    train_plan(plan, pair, tmp_path / "reference", engine="reference", **scored)
    folders = {n: tmp_path / n for n in ("fit", "reference")}
    folders["ranks"] = on_ranks(4)["folder"] / "ranks"
    scores = {
        name: {row["step"]: row["mean_iou"] for row in history(folder) if "mean_iou" in row}
        for name, folder in folders.items()
    }
    assert list(scores["ranks"]) == [2, 3, 4]  # its first part ended after 3
    assert list(scores["reference"]) == list(scores["fit"]) == [2, 4]
    for name in ("reference", "ranks"):
        for step, value in scores["fit"].items():
            assert scores[name][step] == pytest.approx(value, abs=5e-4)
    assert abs(scores["fit"][2] - scores["fit"][4]) > 5e-3  # so that it matters which step


@pytest.mark.parametrize("way", ["fit", "train_plan"])
def test_final_weights_are_rounded_where_asked(tmp_path: Path, way: str) -> None:
    """To torch's nearest bf16, kernels only; scored as rounded, and trained the same."""
    plan, pair = fitted_plan(steps=2, calibrate_bias=False), scene_pair()
    for dtype in ("fp32", "bf16"):
        common: dict[str, Any] = {"val": pair, "weights_dtype": dtype, "progress": False}
        if way == "fit":
            fit(plan.spec, pair, plan.train, out=tmp_path / dtype, mode="whole", **common)
        else:
            train_plan(plan, pair, tmp_path / dtype, engine="reference", **common)
    assert losses(tmp_path / "fp32") == losses(tmp_path / "bf16")
    full, narrow = (load_weights(tmp_path / n / "weights.safetensors") for n in ("fp32", "bf16"))
    got = narrow.model.state_dict()
    for name, tensor in full.model.state_dict().items():
        kernel = tensor.ndim > 1
        assert torch.equal(got[name], tensor.bfloat16().float() if kernel else tensor)
        assert torch.equal(got[name], tensor) != kernel
    reader = TileReader.of(plan.spec, pair.image, pair.labels, normalise=narrow.normalise)
    assert narrow.card["scores"] == plain_scores(evaluate(narrow.model, reader))


def test_a_run_goes_on_under_another_plan(tmp_path: Path) -> None:
    """Bit for bit as if it had not stopped, since the order of all sums stays the same."""
    pair, plan = scene_pair(), fitted_plan(cuts=(9,))
    train_plan(plan, pair, tmp_path / "a", engine="reference", progress=False)
    for stop, cuts in ((2, (9,)), (None, (5, 12))):
        train_plan(fitted_plan(cuts=cuts), pair, tmp_path / "b", engine="reference",
                   stop_after=stop, progress=False)  # fmt: skip
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    a, b = (load_weights(tmp_path / n / "weights.safetensors").model for n in "ab")
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y)


def test_another_run_is_refused(tmp_path: Path) -> None:
    pair, plan = scene_pair(), fitted_plan()
    train_plan(plan, pair, tmp_path, engine="reference", stop_after=1, progress=False)
    before = (tmp_path / "history.jsonl").read_text()
    with pytest.raises(CheckpointError, match="learning_rate"):
        train_plan(fitted_plan(learning_rate=0.5), pair, tmp_path, engine="reference",
                   progress=False)  # fmt: skip
    assert (tmp_path / "history.jsonl").read_text() == before


@pytest.mark.parametrize("precision", ["bf16-autocast", "bf16"])
def test_narrow_precisions_learn(tmp_path: Path, precision: str) -> None:
    """Close to fp32 for a few steps: bf16 has 8 bits, so 1 part in 256."""
    full, narrow = (
        train_plan(fitted_plan(precision=p, steps=3), scene_pair(), tmp_path / p,
                   engine="reference", progress=False).loss
        for p in ("fp32", precision)
    )  # fmt: skip
    assert narrow == pytest.approx(full, rel=2e-2)
    assert losses(tmp_path / precision)[-1] < losses(tmp_path / precision)[0]


def test_run_plan_takes_plain_arguments(tmp_path: Path) -> None:
    """Files in, plain values out; the same run as with the objects."""
    image, labels = scene()
    np.save(tmp_path / "image.npy", image.astype(np.float32))
    np.save(tmp_path / "labels.npy", labels)
    plan = fitted_plan(steps=2, calibrate_bias=False)
    plan.save(tmp_path / "plan.yaml")
    files = (tmp_path / "image.npy", tmp_path / "labels.npy")
    done = run_plan(
        tmp_path / "plan.yaml", *files, tmp_path / "out", engine="reference",
        val_image=files[0], val_labels=files[1], progress=False,
    )  # fmt: skip
    assert done["loss"] == losses(tmp_path / "out")[-1]
    assert 0 <= done["scores"]["mean_iou"] <= 1
    stored = json.loads((tmp_path / "out" / "run.json").read_text())
    assert Plan.from_dict(stored["plan"]) == plan
    assert load_weights(done["weights"]).card["engine"] == "reference"
