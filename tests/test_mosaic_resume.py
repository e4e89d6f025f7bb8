"""Interrupted mosaics resume to the bytes of an uninterrupted one; nothing written is lost."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from bigunet import UNetSpec
from bigunet.errors import OutputError
from bigunet.model import UNet
from bigunet.mosaic import open_mosaic, segment
from bigunet.mosaic.store import WorkStore, chunk_of

ROOT = Path(__file__).parents[1]
# A nursery imports the libraries once, then forks a process for each path that it reads. It prints
# the process' number as that starts, and how it ended.
NURSERY = """
import os, sys, numpy as np, torch
from bigunet import UNetSpec
from bigunet.model import UNet
from bigunet.mosaic import segment

def work(scene, out, limit):
    if limit:
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = UNet(UNetSpec(levels=3, channels=4, classes=4))
    try:
        segment(net, np.load(scene), tile=32, out=out, precision="fp32", probabilities=True,
                progress=False)
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return "done"

print("ready", flush=True)
for line in sys.stdin:
    out, limit = line.split()
    into, outof = os.pipe()
    child = os.fork()
    if not child:
        os.write(outof, work(sys.argv[1], out, int(limit)).encode())
        os._exit(0)
    os.close(outof)
    print(child, flush=True)
    text = os.fdopen(into).read()
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), text, flush=True)
"""


class Nursery:
    """Processes that make the mosaic of one scene, one at a time."""

    def __init__(self, scene: Path) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        env |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        command = [sys.executable, "-c", NURSERY, str(scene)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def run(self, out: Path, *, limit: int = 0, kill_after: float | None = None) -> tuple[int, str]:
        """Exit code (negative: the signal's number) and "done" or the error's text."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{out} {limit}\n")
        self.process.stdin.flush()
        child = int(self._line())
        if kill_after is not None:
            time.sleep(kill_after)
            # Its nursery has not waited for it yet, or has said so: the number is still its own.
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        code, _, text = self._line().partition(" ")
        return int(code), text


def network() -> UNet:
    torch.manual_seed(0)
    return UNet(UNetSpec(levels=3, channels=4, classes=4))


def run(scene: Path, out: Path) -> None:
    """The child's run, here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    segment(
        network(), np.load(scene), tile=32, out=out, precision="fp32", probabilities=True,
        progress=False,
    )  # fmt: skip
    torch.set_num_threads(threads)


def tree(path: Path) -> dict[str, str]:
    """Every file's name and hash."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scene") / "scene.npy"
    data = np.random.default_rng(0).normal(size=(3, 400, 410)).astype(np.float32)
    data[:, 100:140, 30:90] = np.nan
    np.save(path, data)
    return path


@pytest.fixture(scope="module")
def nursery(scene: Path) -> Iterator[Nursery]:
    nursery = Nursery(scene)
    yield nursery
    nursery.process.communicate()
    assert nursery.process.returncode == 0


@pytest.fixture(scope="module")
def whole(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """An uninterrupted mosaic of another process, and the seconds that it took."""
    out = tmp_path_factory.mktemp("whole") / "mosaic.zarr"
    began = time.perf_counter()
    assert nursery.run(out) == (0, "done")
    return out, time.perf_counter() - began


def test_killed_at_ten_random_moments_it_ends_with_the_same_bytes(
    nursery: Nursery, whole: tuple[Path, float], tmp_path: Path
) -> None:
    expected, seconds = tree(whole[0]), whole[1]
    rng, out = random.Random(0), tmp_path / "mosaic.zarr"
    work = WorkStore(out)
    killed, reached = 0, set()
    for attempt in range(60):
        if killed == 10:
            break
        code, _ = nursery.run(out, kill_after=rng.uniform(0, 0.4) * seconds)
        if code == -signal.SIGKILL:
            killed += 1
            reached.add(work.journal.read_bytes().count(b"\n") if work.journal.exists() else 0)
        if out.exists():  # it got to its end: look at that, and begin anew
            assert tree(out) == expected
            out.rename(tmp_path / f"finished-{attempt}.zarr")
    assert killed == 10
    assert len(reached) > 3, f"the kills hit different moments: {reached}"
    assert nursery.run(out) == (0, "done")
    assert tree(out) == expected
    assert not list(tmp_path.glob("*.partial"))


def test_interrupted_from_the_keyboard_it_resumes(
    scene: Path, whole: tuple[Path, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "mosaic.zarr"
    plain, calls = WorkStore.mark, []

    def mark(self: WorkStore, unit: int, ignored: int) -> None:
        plain(self, unit, ignored)
        calls.append(unit)
        if len(calls) == 7:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(WorkStore, "mark", mark)
    with pytest.raises(KeyboardInterrupt) as caught:
        run(scene, out)
    assert any("the same call resumes" in note for note in caught.value.__notes__)
    assert 7 <= len(calls) < 150
    first = set(calls)
    monkeypatch.setattr(WorkStore, "mark", plain)
    done: list[int] = []
    monkeypatch.setattr(WorkStore, "mark", lambda s, u, i: (done.append(u), plain(s, u, i))[1])
    run(scene, out)
    assert not first & set(done), "finished tiles are not computed again"
    assert tree(out) == tree(whole[0])


def test_a_tiff_resumes_too(scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, out = tmp_path / "straight.tif", tmp_path / "mosaic.tif"
    run(scene, straight)
    plain = WorkStore.publish

    def dies(self: WorkStore, made: Path, *, replace: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(WorkStore, "publish", dies)
    with pytest.raises(KeyboardInterrupt):
        run(scene, out)
    monkeypatch.setattr(WorkStore, "publish", plain)
    run(scene, out)
    assert out.read_bytes() == straight.read_bytes()
    one, other = (p.with_name(p.stem + ".probabilities.tif") for p in (out, straight))
    assert one.read_bytes() == other.read_bytes()


def test_a_disk_that_fills_up_keeps_what_is_written(
    nursery: Nursery, whole: tuple[Path, float], tmp_path: Path
) -> None:
    """A limit on file sizes fails writes as a full disk does, at the first chunk above it."""
    out = tmp_path / "mosaic.zarr"
    sizes = [p.stat().st_size for p in (whole[0] / "probabilities").rglob("*") if p.is_file()]
    code, text = nursery.run(out, limit=sorted(sizes)[len(sizes) // 2])
    assert code == 0
    assert text.startswith("OutputError the disk has room for the output; got ")
    assert "Free space on that disk, then run the same again" in text
    assert "The finished tiles are kept in mosaic.zarr.partial" in text
    assert not out.exists()
    assert nursery.run(out) == (0, "done")
    assert tree(out) == tree(whole[0])


def test_choices_left_open_are_taken_from_the_unfinished_run(
    scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory at hand may differ when the run resumes; the tile may not."""
    out = tmp_path / "mosaic.zarr"
    monkeypatch.setattr(WorkStore, "finish", lambda *a, **k: signal.raise_signal(signal.SIGINT))
    kwargs = {"out": out, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        segment(network(), np.load(scene), **kwargs)
    monkeypatch.undo()
    header = json.loads(WorkStore(out).journal.read_text().splitlines()[0])
    data = segment(network(), np.load(scene), memory_bytes=3 << 20, **kwargs)
    assert data.attrs["tile"] == header["settings"]["tile"]
    assert data.attrs["precision"] == header["settings"]["precision"]


def test_an_unfinished_output_of_another_run_is_not_touched(
    scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "mosaic.zarr"
    monkeypatch.setattr(WorkStore, "finish", lambda *a, **k: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run(scene, out)
    monkeypatch.undo()
    before = tree(WorkStore(out).folder)
    with pytest.raises(OutputError, match=r"which differs in tile.*overwrite=True"):
        segment(
            network(), np.load(scene), tile=64, out=out, precision="fp32", probabilities=True,
            progress=False,
        )  # fmt: skip
    assert tree(WorkStore(out).folder) == before
    with pytest.raises(OutputError, match=r"which is not finished.*Run the same segment"):
        open_mosaic(out)
    data = segment(network(), np.load(scene), tile=64, out=out, overwrite=True, progress=False)
    assert data.attrs["tile"] == [64, 64]


def test_two_runs_do_not_write_one_output(scene: Path, tmp_path: Path) -> None:
    out = tmp_path / "mosaic.zarr"
    other = WorkStore(out)
    other.lock()
    try:
        with pytest.raises(OutputError, match="which another process is writing"):
            run(scene, out)
    finally:
        other.close()


def test_a_torn_journal_line_does_not_count(scene: Path, tmp_path: Path) -> None:
    work = WorkStore(tmp_path / "mosaic.zarr")
    work.path.mkdir(parents=True)
    (work.path / "zarr.json").write_text("{}")
    whole = b'{"settings": {}}\n{"ignored": 0, "unit": 4}\n'
    work.journal.write_bytes(whole + b'{"ignored": 1, "un')
    work.load()
    assert work.done == {4: 0}
    assert work.journal.read_bytes() == whole
    work.journal.write_bytes(b'{"settings"')
    work.load()
    assert work.header is None


def test_chunks_divide_tiles() -> None:
    assert [chunk_of(n) for n in (16, 512, 976, 1024, 2048, 1504)] == [16, 512, 488, 512, 512, 376]
