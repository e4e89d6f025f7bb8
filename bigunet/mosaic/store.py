"""Where an unfinished mosaic lives: a Zarr store, a journal of finished units, and a lock.

Everything is written in `<out>.partial/` beside the output and moved into place in one rename, so
that the output exists only when it is complete:

    <out>.partial/lock            held while a run writes
    <out>.partial/store/          the Zarr group that becomes the output
    <out>.partial/journal.jsonl   the run's settings, then one line for each finished unit

A unit is written down only after its chunks have reached the disk. Chunks are divisors of the
tiles, so no chunk has two writers, and each is replaced in one rename (zarr's LocalStore does
that); a run that is killed at any moment therefore resumes to the same bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from bigunet.errors import OutputError, fail
from bigunet.mosaic.pyramid import IGNORE, majority, num_levels, strips
from bigunet.tiles import Box

__all__ = ["CHUNK", "WorkStore", "chunk_of", "disk_errors", "fsync_path"]

#: Chunks have at most this side.
CHUNK = 512
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def chunk_of(core: int) -> int:
    """The largest divisor of a core's side that is at most `CHUNK`."""
    return next(n for n in range(min(core, CHUNK), 0, -1) if core % n == 0)


@contextlib.contextmanager
def disk_errors(what: str, remedy: str) -> Iterator[None]:
    """An `OSError` inside becomes an `OutputError` that says whether the disk is full."""
    try:
        yield
    except OSError as error:
        full = error.errno in _FULL
        fail(
            OutputError,
            rule="the disk has room for the output" if full else "the output can be written",
            got=f"{what}: {error.strerror or error}",
            remedy=("Free space on that disk, then run the same again: " if full else "") + remedy,
        )


def fsync_path(path: Path) -> None:
    """Have a file (or a folder's entries) reach the disk; one that is not there is fine."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class WorkStore:
    """The folder of one unfinished mosaic. `done` maps finished units to their ignored pixels."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out.with_name(out.name + ".partial")
        self.path = self.folder / "store"
        self.journal = self.folder / "journal.jsonl"
        self.header: dict[str, Any] | None = None
        self.done: dict[int, int] = {}
        self._arrays: dict[str, Any] = {}
        self._lock: int | None = None
        self._log: int | None = None

    # Opening and closing -------------------------------------------------------------------------

    def lock(self) -> None:
        """Take the folder for this process.

        Raises
        ------
        OutputError : where it cannot be made, or another process has it.
        """
        with disk_errors(str(self.folder), "Choose a folder that you may write to."):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            fail(
                OutputError,
                rule="one run at a time writes an output",
                got=f"{self.out}, which another process is writing",
                remedy="Wait for it, or choose another path.",
            )

    def load(self) -> None:
        """Read the journal; a last line that was cut short does not count."""
        self.header, self.done = None, {}
        if not self.journal.exists() or not (self.path / "zarr.json").exists():
            return
        whole = self.journal.read_bytes()
        lines = whole.split(b"\n")
        if len(lines) < 2:
            return
        try:
            header, *entries = (json.loads(line) for line in lines[:-1])
            self.done = {int(e["unit"]): int(e["ignored"]) for e in entries}
        except (ValueError, KeyError, TypeError):
            self.done = {}
            return
        self.header = header
        if lines[-1]:
            os.truncate(self.journal, len(whole) - len(lines[-1]))

    def clear(self) -> None:
        """Forget the unfinished mosaic, but keep the lock."""
        self.header, self.done, self._arrays = None, {}, {}
        if self._log is not None:
            os.close(self._log)
            self._log = None
        for name in ("journal.jsonl", "result.tif", "probabilities.tif"):
            (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Let go of the folder; it stays for the next run unless `discard` removed it."""
        for name in ("_log", "_lock"):
            handle = getattr(self, name)
            if handle is not None:
                os.close(handle)
                setattr(self, name, None)

    def discard(self) -> None:
        """Remove the folder altogether."""
        shutil.rmtree(self.folder, ignore_errors=True)

    # Writing -------------------------------------------------------------------------------------

    def create(
        self,
        header: Mapping[str, Any],
        shape: tuple[int, int],
        core: tuple[int, int],
        coords: Mapping[str, np.ndarray[Any, Any]],
        probabilities: tuple[int, str] | None,
        attrs: Mapping[str, Any],
    ) -> None:
        """Make the empty store, then the journal's first line, which makes it count."""
        self.clear()
        group = zarr.open_group(str(self.path), mode="w", zarr_format=3)
        _axes(group, coords)
        chunk = chunk_of(core[0]), chunk_of(core[1])
        _array(group, "labels", shape, chunk, "uint8", ("y", "x"), IGNORE, attrs)
        if probabilities is not None:
            num, dtype = probabilities
            about = {"units": "1", "long_name": "class probability"}
            if dtype == "uint8":
                about["comment"] = "probability times 255, rounded"
            dims = ("class", "y", "x")
            fill = 0 if dtype == "uint8" else float("nan")
            _array(group, "probabilities", (num, *shape), (num, *chunk), dtype, dims, fill, about)
        self._write_line(dict(header))
        self.header, self.done = dict(header), {}

    def resume(self) -> None:
        """Ready the store for the missing units: what a killed write left half done goes away."""
        for path in self.path.rglob("*.partial"):
            path.unlink(missing_ok=True)

    def write(
        self,
        box: Box,
        labels: np.ndarray[Any, Any],
        probabilities: np.ndarray[Any, Any] | None,
    ) -> None:
        """One tile's result, on the disk when this returns."""
        if not self._arrays:
            group = zarr.open_group(str(self.path), mode="r+")
            self._arrays = {
                name: group[name] for name in ("labels", "probabilities") if name in group
            }
        for name, values in (("labels", labels), ("probabilities", probabilities)):
            if values is None:
                continue
            array = self._arrays[name]
            array[(..., *box.slices)] = values
            height, width = array.chunks[-2:]
            lead = ("c", "0") if values.ndim == 3 else ("c",)
            for i in range(box.y0 // height, -(-box.y1 // height)):
                row = self.path.joinpath(name, *lead, str(i))
                for j in range(box.x0 // width, -(-box.x1 // width)):
                    fsync_path(row / str(j))
                fsync_path(row)

    def mark(self, unit: int, ignored: int) -> None:
        """Write down that a unit is finished."""
        self._write_line({"unit": unit, "ignored": ignored})
        self.done[unit] = ignored

    def _write_line(self, entry: Mapping[str, Any]) -> None:
        if self._log is None:
            self._log = os.open(self.journal, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o666)
        line = json.dumps(entry, sort_keys=True).encode() + b"\n"
        # A full disk may take a part of a line: cut it off again, so that the next one is whole.
        before = os.fstat(self._log).st_size
        if os.write(self._log, line) != len(line):
            os.ftruncate(self._log, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(self._log)

    def finish(self, attrs: Mapping[str, Any], step: tuple[float, float], rows: int = 2048) -> None:
        """Add the pyramid and the attributes: the store is complete after this."""
        group = zarr.open_group(str(self.path), mode="r+")
        shutil.rmtree(self.path / "pyramid", ignore_errors=True)
        base: Any = group["labels"]
        above = base
        about = dict(base.attrs)
        y, x = np.asarray(group["y"]), np.asarray(group["x"])
        corner = y[0] - step[0] / 2, x[0] - step[1] / 2
        for level in range(1, num_levels(base.shape) + 1):
            part = group.require_group(f"pyramid/{level}")
            shape = -(-above.shape[0] // 2), -(-above.shape[1] // 2)
            factor = 2**level
            _axes(
                part,
                {
                    "y": corner[0] + step[0] * factor * (np.arange(shape[0]) + 0.5),
                    "x": corner[1] + step[1] * factor * (np.arange(shape[1]) + 0.5),
                },
            )
            below = _array(
                part,
                "labels",
                shape,
                (CHUNK, CHUNK),
                "uint8",
                ("y", "x"),
                IGNORE,
                {**about, "factor": factor},
            )
            strips(above.shape[0], rows, _reader(above), _writer(below), majority)
            above = below
        group.attrs.update(attrs)

    def publish(self, made: Path, *, replace: bool) -> None:
        """Move what was made into the output's place, and remove the folder."""
        if replace and self.out.exists():
            old = self.folder / "replaced"
            if old.exists():
                shutil.rmtree(old)
            os.rename(self.out, old)
        os.rename(made, self.out)
        fsync_path(self.out.parent)
        self.discard()


def _reader(array: Any) -> Callable[[int, int], np.ndarray[Any, Any]]:
    return lambda y0, y1: np.asarray(array[y0:y1])


def _writer(array: Any) -> Callable[[int, np.ndarray[Any, Any]], None]:
    def write(y: int, block: np.ndarray[Any, Any]) -> None:
        array[y : y + block.shape[0]] = block

    return write


def _axes(group: Any, coords: Mapping[str, np.ndarray[Any, Any]]) -> None:
    for name, values in coords.items():
        values = np.asarray(values)
        array = _array(group, name, values.shape, values.shape, str(values.dtype), (name,), 0, {})
        array[:] = values


def _array(
    group: Any,
    name: str,
    shape: tuple[int, ...],
    chunks: tuple[int, ...],
    dtype: str,
    dims: tuple[str, ...],
    fill: float,
    attrs: Mapping[str, Any],
) -> Any:
    return group.create_array(
        name,
        shape=shape,
        chunks=chunks,
        dtype=dtype,
        dimension_names=dims,
        fill_value=fill,
        attributes=dict(attrs),
    )
