"""The training loop: resumption to the last bit, kills, whole images, what it refuses."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from rank_work import (
    SPEC,
    TRAIN,
    gradients,
    train_in_parts,
    train_to_the_end,
    whole_gradients,
    worst,
)

from bigunet.calibrate import freeze_norm
from bigunet.checkpoint import load_weights
from bigunet.errors import (
    BigUNetError,
    CheckpointError,
    ExactnessError,
    OutputError,
    SceneError,
    ShapeError,
    SpecError,
)
from bigunet.launch import launch
from bigunet.model import UNet
from bigunet.optimisers import optimiser
from bigunet.scenes import Normalise, ScenePair, normalisation, synthetic
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.train import fit

SCENE = synthetic((70, 90), 1)


def rows(folder: Path) -> list[dict[str, Any]]:
    """The history without what a clock measured."""
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return dict(load_weights(path).model.state_dict())


def assert_same_run(one: Path, two: Path) -> None:
    assert rows(one) == rows(two)
    a, b = (tensors(folder / "weights.safetensors") for folder in (one, two))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16"},
        {"precision": "bf16-autocast", "freeze_norm": False, "loss": "cross_entropy+dice"},
        {"optimiser": "momentum", "average": 0.0, "focus": (1.0, 0.0, 0.0, 1.0, 0.0)},
    ],
)
def test_a_run_in_parts_is_the_run_in_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    train = TRAIN.replace(**changes)
    for folder, parts in (("one", (None,)), ("parts", (1, 4, None))):
        for stop_after in parts:
            fit(
                SPEC,
                SCENE,
                train,
                out=tmp_path / folder,
                stop_after=stop_after,
                save_every=3,
                progress=False,
            )
    assert_same_run(tmp_path / "one", tmp_path / "parts")
    assert len(rows(tmp_path / "one")) == TRAIN.steps


def test_two_ranks_in_parts_are_two_ranks_in_one(tmp_path: Path) -> None:
    """Bit for bit with as many ranks; another number gives the same to rounding."""
    for folder, parts in (("one", [None]), ("parts", [3, None])):
        launch(
            train_in_parts,
            (str(tmp_path / folder), parts),
            ranks=2,
            threads_per_rank=1,
            progress=False,
        )
    assert_same_run(tmp_path / "one", tmp_path / "parts")


_NUM_KILLS = 10


def test_killed_ten_times_it_ends_as_if_never(tmp_path: Path) -> None:
    """SIGKILL at random moments: while starting, computing, writing.

    A run that is through before its kill is compared, and another one begun for the kills left.
    """
    train_to_the_end(str(tmp_path / "one"))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bigunet.train", "torchmetrics"])
    rng = np.random.default_rng()
    history, kills = tmp_path / "killed" / "history.jsonl", 0
    while kills < _NUM_KILLS:
        lines = len(history.read_bytes()) if history.exists() else 0
        process = context.Process(target=train_to_the_end, args=(str(tmp_path / "killed"),))
        process.start()
        # Some are killed before their first step, most some moments after a step or two.
        if kills % 4:
            while process.is_alive() and not (history.exists() and history.stat().st_size > lines):
                time.sleep(0.002)
        time.sleep(float(rng.uniform(0, 0.1)))
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        if process.exitcode == 0:
            assert_same_run(tmp_path / "one", tmp_path / "killed")
            shutil.rmtree(tmp_path / "killed")
        else:
            kills += 1
    train_to_the_end(str(tmp_path / "killed"))
    assert_same_run(tmp_path / "one", tmp_path / "killed")


def test_an_interrupt_ends_the_step_and_saves(tmp_path: Path) -> None:
    def interrupt() -> None:
        while not (tmp_path / "run" / "history.jsonl").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    handler = signal.getsignal(signal.SIGINT)
    long = TRAIN.replace(steps=10_000)
    with pytest.raises(KeyboardInterrupt, match="run again to go on"):
        fit(SPEC, SCENE, long, out=tmp_path / "run", save_every=10**6, progress=False)
    thread.join()
    assert signal.getsignal(signal.SIGINT) is handler
    done = rows(tmp_path / "run")[-1]["step"]
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name == f"step_{done:08d}.ckpt"


def test_it_learns_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scene = synthetic((160, 160), 0)
    train = TrainSpec(
        tile=32,
        batch=4,
        steps=60,
        warmup_steps=5,
        learning_rate=0.01,
        average=0.9,
        jitter=0.05,
        calibrate_bias=True,
    )
    fitted = fit(
        SPEC.replace(channels=8, dropout=0.0),
        scene,
        train,
        out=tmp_path,
        val=scene,
        validate_every=30,
        leave_out=("field",),
        card={"command": "a test"},
    )
    assert fitted.scores is not None
    share = np.bincount(np.asarray(scene.labels).ravel()).max() / scene.labels.size
    assert float(fitted.scores["accuracy"]) > share
    history = rows(tmp_path)
    losses = [row["loss"] for row in history if "loss" in row]
    assert len(losses) == 60
    assert np.mean(losses[-10:]) < 0.6 * losses[0]
    assert [row["step"] for row in history if "mean_iou" in row] == [30, 60]
    weights = load_weights(fitted.weights)
    assert weights.card["scores"]["mean_iou_kept"] == history[-1]["mean_iou_kept"]
    assert weights.card["command"] == "a test"
    assert weights.card["train"] == train.to_dict()
    assert weights.normalise == fitted.normalise
    assert weights.classes == scene.classes
    assert "60/60" in capsys.readouterr().err


def test_whole_mode_takes_the_whole_images_gradient(tmp_path: Path) -> None:
    """One step of plain SGD by `fit` equals one by hand on the whole image, turned as drawn."""
    spec = UNetSpec(levels=3, convs=1, channels=4, classes=5)
    train = TrainSpec(
        optimiser="sgd", learning_rate=1.0, steps=1, tile=16, augment=False, weight_decay=0.0
    )
    fitted = fit(spec, SCENE, train, out=tmp_path, mode="whole", progress=False)
    torch.manual_seed(train.seed)
    model = UNet(spec)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    pixels = normalisation(SCENE.image).apply(np.asarray(SCENE.image))
    _, expected = whole_gradients(model, pixels, np.asarray(SCENE.labels))
    got = {n: before[n] - p.detach() for n, p in fitted.model.named_parameters()}
    assert worst(got, expected) < 1e-4
    with pytest.raises(ExactnessError, match="dropout"):
        fit(SPEC, SCENE, TRAIN, out=tmp_path / "b", mode="whole", progress=False)
    with pytest.raises(ExactnessError, match="training mode"):
        fit(
            SPEC.replace(dropout=0.0),
            SCENE,
            TRAIN.replace(freeze_norm=False),
            out=tmp_path / "b",
            exact=True,
            progress=False,
        )
    assert not (tmp_path / "b").exists()


def test_bf16_moves_fp32_weights(tmp_path: Path) -> None:
    """Updates far below bf16's resolution must not be lost."""
    train = TrainSpec(
        optimiser="sgd", learning_rate=1e-6, steps=3, tile=16, precision="bf16", final_rate=1.0
    )
    spec = UNetSpec(levels=2, convs=1, channels=4, classes=5)
    fitted = fit(spec, SCENE, train, out=tmp_path, progress=False)
    torch.manual_seed(0)
    for before, after in zip(UNet(spec).parameters(), fitted.model.parameters(), strict=True):
        assert after.dtype == torch.float32
        assert not torch.equal(before, after)
        assert torch.allclose(before, after, atol=1e-3)


def test_it_starts_from_weights(tmp_path: Path) -> None:
    first = fit(SPEC, SCENE, TRAIN.replace(average=0.0), out=tmp_path / "a", progress=False)
    start = load_weights(first.weights)
    slow = TRAIN.replace(learning_rate=1e-9, steps=1, warmup_steps=0, average=0.0)
    second = fit(SPEC, SCENE, slow, out=tmp_path / "b", start=start, progress=False)
    for one, two in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-7)
    with pytest.raises(CheckpointError, match="channels=4 instead of 8"):
        fit(SPEC.replace(channels=8), SCENE, slow, out=tmp_path / "c", start=start)


def test_weight_decay_spares_biases() -> None:
    groups = optimiser(UNet(SPEC), TRAIN).param_groups
    assert [group["weight_decay"] for group in groups] == [TRAIN.weight_decay, 0.0]
    assert all(p.ndim > 1 for p in groups[0]["params"])
    assert all(p.ndim == 1 for p in groups[1]["params"])


def test_an_output_of_another_run_is_left_alone(tmp_path: Path) -> None:
    fit(SPEC, SCENE, TRAIN, out=tmp_path, stop_after=2, progress=False)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for spec, train, text in (
        (SPEC.replace(channels=8), TRAIN, "channels=4 instead of 8"),
        (SPEC, TRAIN.replace(seed=1, steps=9), "seed=0 instead of 1, steps=8 instead of 9"),
    ):
        with pytest.raises(CheckpointError, match=text):
            fit(spec, SCENE, train, out=tmp_path, progress=False)
    with pytest.raises(CheckpointError, match="shape"):
        fit(SPEC, synthetic((64, 64), 1), TRAIN, out=tmp_path, progress=False)
    with pytest.raises(OutputError, match="Choose another folder, or resume"):
        fit(SPEC, SCENE, TRAIN, out=tmp_path, resume=False, progress=False)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="can be written"):
        fit(SPEC, SCENE, TRAIN, out=tmp_path / "file", progress=False)


def _scene(**changes: Any) -> ScenePair:
    image = xr.DataArray(np.asarray(SCENE.image), dims=("band", "y", "x"))
    labels = xr.DataArray(np.asarray(SCENE.labels), dims=("y", "x"), attrs=SCENE.labels.attrs)
    return ScenePair(changes.get("image", image), changes.get("labels", labels), SCENE.classes)


@pytest.mark.parametrize(
    ("error", "text", "spec", "train", "changes"),
    [
        (SpecError, "one output for each of the 5 classes", {"classes": 4}, {}, {}),
        (SpecError, "focus has one number", {}, {"focus": (1.0,)}, {}),
        (SpecError, "class_weights has one weight", {}, {"class_weights": (1.0,)}, {}),
        (SceneError, "a class that focus names", {}, {"focus": (0, 0, 1.0, 0, 0)}, {}),
        (ShapeError, "multiples of the stride 2", {}, {"tile": 15}, {}),
        (ShapeError, "no larger than the image", {}, {"tile": 128}, {}),
        (ShapeError, "at least the network's stride", {"levels": 8}, {"tile": 128}, {}),
        (SceneError, "as many bands; got 3", {"in_channels": 13}, {}, {}),
        (
            SceneError,
            "labels are 0 to 4, or 255",
            {},
            {},
            {"labels": xr.DataArray(np.full((70, 90), 9), dims=("y", "x"))},
        ),
        (
            SceneError,
            "at least one pixel",
            {},
            {},
            {"labels": xr.DataArray(np.full((70, 90), 255), dims=("y", "x"))},
        ),
    ],
)
def test_bad_input(
    tmp_path: Path,
    error: type[BigUNetError],
    text: str,
    spec: dict[str, Any],
    train: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    with pytest.raises(error, match=text):
        fit(
            SPEC.replace(**spec),
            _scene(**changes),
            TRAIN.replace(**train),
            out=tmp_path / "out",
            progress=False,
        )
    assert not list(tmp_path.glob("out/checkpoints/*"))


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    wild = TRAIN.replace(optimiser="sgd", learning_rate=1e30, clip_norm=None, warmup_steps=0)
    with pytest.raises(SpecError, match="loss stays finite"):
        fit(SPEC, SCENE, wild, out=tmp_path, progress=False)


def test_odd_imagery(tmp_path: Path) -> None:
    """16-bit, float with NaN, one band; constants as normalisation."""
    rng = np.random.default_rng(0)
    labels = xr.DataArray(rng.integers(0, 5, (40, 40)), dims=("y", "x"))
    deep = rng.integers(0, 65536, (1, 40, 40)).astype(np.uint16)
    real = rng.standard_normal((1, 40, 40)).astype(np.float32)
    real[0, 3, 3] = np.nan
    for name, values in (("deep", deep), ("real", real)):
        image = xr.DataArray(values, dims=("band", "y", "x"))
        fitted = fit(
            SPEC.replace(in_channels=1),
            ScenePair(image, labels),
            TRAIN.replace(steps=2, warmup_steps=0),
            out=tmp_path / name,
            normalise=Normalise((0.5,), (2.0,)) if name == "real" else None,
            progress=False,
        )
        assert np.isfinite(fitted.loss)


def test_frozen_statistics_come_from_the_data(tmp_path: Path) -> None:
    spec = SPEC.replace(dropout=0.0)
    fitted = fit(spec, SCENE, TRAIN.replace(steps=1, warmup_steps=0), out=tmp_path, progress=False)
    model = UNet(spec)
    freeze_norm(model)
    for name, buffer in model.named_buffers():
        if "running" in name:
            assert not torch.equal(buffer, dict(fitted.model.named_buffers())[name])
    assert gradients(fitted.model) == {}
