"""Files that outlive a crash: the state of a training run, and finished weights.

A file is written under a temporary name, flushed to the disk and renamed; the one before it stays
until then. A training state is torch's zip format, whose CRCs are checked before it is trusted
and which is read with `weights_only=True`; if the newest is damaged the one before it is used.
Finished weights are safetensors with everything needed to use them in the header.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from bigunet.errors import CheckpointError, OutputError, SpecError, fail
from bigunet.model import UNet
from bigunet.scenes import ClassTable, Normalise
from bigunet.spec import UNetSpec

__all__ = [
    "Weights",
    "check_spec",
    "demo_weights",
    "latest_state",
    "load_weights",
    "save_state",
    "save_weights",
    "write_atomically",
]

_PATTERN = "step_*.ckpt"
_KEEP = 2


# Any file -------------------------------------------------------------------------------------


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to the disk, then rename it.

    Raises
    ------
    OutputError : where the disk is full or the folder cannot be written; `path` is untouched.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        temporary.chmod(0o644)
        _flush(temporary)
        os.replace(temporary, path)
        _flush(path.parent)
    except (OSError, SafetensorError) as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        fail(
            OutputError,
            rule=f"{path} can be written",
            got=str(error),
            remedy="Free some space, or choose another folder; nothing was overwritten.",
        )
    except BaseException:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# The state of a training run ------------------------------------------------------------------


def save_state(folder: Path, step: int, state: Mapping[str, Any]) -> Path:
    """Write `state` (tensors and plain values) as the newest in `folder`; keeps the one before."""
    path = folder / f"step_{step:08d}.ckpt"

    def write(temporary: Path) -> None:
        try:
            torch.save({**state, "step": step}, temporary)
        except RuntimeError as error:  # torch's zip writer reports a full disk so
            raise OSError(str(error)) from error

    write_atomically(path, write)
    for old in sorted(folder.glob(_PATTERN))[:-_KEEP]:
        old.unlink(missing_ok=True)
    for stray in folder.glob(".step_*.tmp"):  # of a run that was killed while writing
        stray.unlink(missing_ok=True)
    return path


def latest_state(folder: Path) -> dict[str, Any] | None:
    """The newest undamaged state in `folder`, or None where there has been none.

    Warns where a newer one is damaged and passed over.

    Raises
    ------
    CheckpointError : where there are states and none is whole.
    """
    faults = []
    for path in sorted(folder.glob(_PATTERN), reverse=True):
        try:
            state = _read_state(path)
        except CheckpointError as error:
            faults.append(error)
            continue
        for fault in faults:
            warnings.warn(f"{fault} Continuing from {path.name}.", stacklevel=2)
        return state
    if faults:
        raise faults[0]
    return None


def _read_state(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"{damaged} does not match its checksum")
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        state["step"] + 0
        return state
    except Exception as error:  # whatever a damaged file makes of the readers
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        fail(
            CheckpointError,
            rule=f"{path} is a whole checkpoint",
            got=reason,
            remedy="Delete it to continue from an older one, or start anew in another folder.",
        )


# Finished weights -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Weights:
    """A trained network with what is needed to use it; `model` is in eval mode, fp32.

    `card` says how it was made: command, seconds, seed, scores. `sha256` is the file's.
    """

    spec: UNetSpec
    model: UNet
    normalise: Normalise | None = None
    classes: ClassTable | None = None
    card: dict[str, Any] = field(default_factory=dict)
    sha256: str = ""


def save_weights(
    path: str | Path,
    model: UNet,
    *,
    normalise: Normalise | None = None,
    classes: ClassTable | None = None,
    card: Mapping[str, Any] | None = None,
    dtype: Literal["fp32", "bf16"] = "fp32",
) -> Path:
    """Write a network as safetensors; "bf16" halves the file and rounds kernels to 8 bits.

    Tensors of one axis (biases, scales, running statistics) stay in fp32.

    Raises
    ------
    OutputError : where the file cannot be written.
    """
    path = Path(path)
    tensors = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach().cpu().contiguous()
        # Biases, scales and statistics are few, and their last bits matter.
        narrow = dtype == "bf16" and tensor.is_floating_point() and tensor.ndim > 1
        tensors[name] = tensor.to(torch.bfloat16) if narrow else tensor.clone()
    header = {
        "format": "bigunet-weights-1",
        "spec": json.dumps(model.spec.to_dict()),
        "normalise": json.dumps(None if normalise is None else normalise.to_dict()),
        "classes": json.dumps(None if classes is None else classes.to_dict()),
        "card": json.dumps(dict(card or {})),
    }
    write_atomically(path, lambda temporary: save_file(tensors, temporary, header))
    return path


def load_weights(path: str | Path, *, spec: UNetSpec | None = None) -> Weights:
    """The network in a file of `save_weights`.

    Parameters
    ----------
    spec : the network that is expected, if any.

    Raises
    ------
    CheckpointError : for a missing, damaged or foreign file, or one of another spec.
    """
    path = Path(path)
    if not path.is_file():
        fail(
            CheckpointError,
            rule="weights are read from a file",
            got=f"no file {path}",
            remedy="Check the path, or train some with `bigunet train`.",
        )
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        stored = UNetSpec.from_dict(json.loads(header["spec"]))
        normalise, classes = (json.loads(header[key]) for key in ("normalise", "classes"))
        card = json.loads(header["card"])
        model = UNet(stored)
        model.load_state_dict(
            {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
        )
    except (
        SafetensorError,
        OSError,
        KeyError,
        json.JSONDecodeError,
        RuntimeError,
        SpecError,
    ) as error:
        fail(
            CheckpointError,
            rule=f"{path} holds weights written by bigunet, whole",
            got=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            remedy="Copy or train them again.",
        )
    if spec is not None:
        check_spec(spec.to_dict(), stored.to_dict(), f"the weights in {path}")
    return Weights(
        stored,
        model.eval(),
        None if normalise is None else Normalise.from_dict(normalise),
        None if classes is None else ClassTable.from_dict(classes),
        card,
        hashlib.sha256(path.read_bytes()).hexdigest(),
    )


def check_spec(wanted: Mapping[str, Any], stored: Mapping[str, Any], what: str) -> None:
    """Raise `CheckpointError` naming every field in which two specs differ."""
    names = sorted({*wanted, *stored})
    differ = [n for n in names if wanted.get(n) != stored.get(n)]
    if differ:
        fail(
            CheckpointError,
            rule=f"{what} were made with the spec that is asked for",
            got=", ".join(f"{n}={stored.get(n)!r} instead of {wanted.get(n)!r}" for n in differ),
            remedy="Use that spec, or another file or folder.",
        )


def demo_weights() -> Weights:
    """The network for the Earth scene that comes with the package."""
    return load_weights(str(files("bigunet") / "data" / "earth_unet.safetensors"))
