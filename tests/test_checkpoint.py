"""Files that survive crashes and damage: training states, finished weights."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigunet.checkpoint import (
    latest_state,
    load_weights,
    save_state,
    save_weights,
    write_atomically,
)
from bigunet.errors import CheckpointError, OutputError
from bigunet.model import UNet
from bigunet.scenes import ClassTable, Normalise
from bigunet.spec import UNetSpec

SPEC = UNetSpec(levels=3, convs=1, channels=8, norm="batch", classes=3)


def network() -> UNet:
    model = UNet(SPEC)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(1e-3, 2)
    return model


def states(folder: Path, *steps: int) -> list[Path]:
    return [save_state(folder, s, {"weight": torch.full((100,), float(s))}) for s in steps]


def test_the_newest_state_is_read_and_two_are_kept(tmp_path: Path) -> None:
    assert latest_state(tmp_path) is None
    paths = states(tmp_path, 3, 20, 100)
    assert [path.exists() for path in paths] == [False, True, True]
    state = latest_state(tmp_path)
    assert state is not None
    assert state["step"] == 100
    assert torch.equal(state["weight"], torch.full((100,), 100.0))


@pytest.mark.parametrize("damage", ["cut", "empty", "flip", "foreign", "pickle"])
def test_a_damaged_state_is_noticed_and_the_one_before_used(tmp_path: Path, damage: str) -> None:
    old, new = states(tmp_path, 1, 2)
    data = bytearray(new.read_bytes())
    middle = data.index(torch.full((100,), 2.0).numpy().tobytes()) + 50
    if damage == "flip":
        data[middle] ^= 1
    if damage == "pickle":  # code that would run on loading is never run
        torch.save({"step": 2, "code": _Bad()}, new)
        data = bytearray(new.read_bytes())
    new.write_bytes({"cut": data[:middle], "empty": b"", "foreign": b"x" * 999}.get(damage, data))
    with pytest.warns(UserWarning, match=rf"{new.name} is a whole checkpoint.*from {old.name}"):
        state = latest_state(tmp_path)
    assert state is not None
    assert state["step"] == 1
    old.write_bytes(b"")
    with pytest.raises(CheckpointError, match="Delete it") as caught:
        latest_state(tmp_path)
    assert str(new) in caught.value.rule


class _Bad:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("false",)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def broken(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match=r"No space left.*nothing was overwritten"):
        write_atomically(path, broken)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]
    (tmp_path / "plain").write_text("")
    with pytest.raises(OutputError, match="can be written"):
        write_atomically(tmp_path / "plain" / "inside", lambda p: None)


def test_a_full_disk_keeps_the_state_before(tmp_path: Path) -> None:
    """A bound on the size of files makes the real writers fail half-way, as a full disk does."""
    states(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OutputError, match="Free some space"):
            save_state(tmp_path, 2, {"weight": torch.zeros(100_000)})
        with pytest.raises(OutputError, match="Free some space"):
            save_weights(tmp_path / "w.safetensors", UNet(SPEC.replace(channels=64)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001.ckpt"]
    assert latest_state(tmp_path)["step"] == 1  # type: ignore[index]


def test_weights_come_back_with_all_that_is_needed(tmp_path: Path) -> None:
    model = network()
    normalise = Normalise((1, 2, 3), (4, 5, 6), 0.0)
    classes = ClassTable(("water", "land", "ice"), ignore=7)
    card = {"seconds": 12.5, "scores": {"mean_iou": 0.5}}
    path = save_weights(
        tmp_path / "w.safetensors", model, normalise=normalise, classes=classes, card=card
    )
    weights = load_weights(path, spec=SPEC)
    assert weights.spec == SPEC
    assert weights.normalise == normalise
    assert weights.classes == classes
    assert weights.card == card
    assert len(weights.sha256) == 64
    assert not weights.model.training
    assert model.state_dict().keys() == weights.model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights.model.state_dict()[name]), name


def test_bf16_weights_are_half_as_large_and_statistics_stay_exact(tmp_path: Path) -> None:
    model = network()
    wide = save_weights(tmp_path / "wide", model).stat().st_size
    path = save_weights(tmp_path / "narrow", model, dtype="bf16")
    assert path.stat().st_size < 0.6 * wide
    got = load_weights(path).model.state_dict()
    for name, tensor in model.state_dict().items():
        assert got[name].dtype == tensor.dtype
        expected = tensor if "running" in name else tensor.bfloat16().to(tensor.dtype)
        assert torch.equal(got[name], expected), name


def test_bad_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no file"):
        load_weights(tmp_path / "none")
    path = save_weights(tmp_path / "w", network())
    with pytest.raises(CheckpointError, match=r"channels=8 instead of 16, levels=3 instead of 2"):
        load_weights(path, spec=SPEC.replace(channels=16, levels=2))
    data = path.read_bytes()
    for damaged in (data[: len(data) // 2], b"", b"x" * 100, data[:30]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="written by bigunet, whole"):
            load_weights(path)
    spec = json.dumps(SPEC.to_dict())
    header = {"spec": spec, "normalise": "null", "classes": "null", "card": "{}"}
    save_file({"a": torch.zeros(2)}, path, header)
    with pytest.raises(CheckpointError, match="Copy or train them again"):
        load_weights(path)
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match="spec"):
        load_weights(path)
