"""Start ranks from a notebook or a shell, as processes of their own.

`launch` hands the work to torchrun (its elastic agent, which picks a free port itself, so that
two launches cannot collide), shows the first rank's progress, and brings back what it returned or
the traceback of the rank that failed first. A busy kernel would freeze a notebook's controls;
these processes leave it free.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tqdm.auto import tqdm

from bigunet.errors import BigUNetError, LaunchError, fail
from bigunet.progress import PROGRESS_FILE
from bigunet.ranks import init

__all__ = ["launch"]

_STOP_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
# What a step frees stays with its process. glibc would hand it back to the system, which gives it
# anew in the next step page by page, zeroed: a sixth of a step on a CPU. (GNU C library manual,
# "Memory Allocation Tunables"; other C libraries ignore these.)
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**40)}
# How torchrun's agent reports a rank that a signal ended; SIGTERM is what it sends itself.
_KILLED = re.compile(r"rank +: (\d+).*\n +exitcode +: -(?!15)(\d+)")


def launch(
    target: str | Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    ranks: int,
    threads_per_rank: int | None = None,
    progress: bool = True,
    timeout_seconds: float | None = None,
) -> Any:
    """Run `target` on `ranks` ranks of this machine and wait for it.

    Parameters
    ----------
    target : a function of an importable module, called as `target(*args, **kwargs)` on every
        rank inside `bigunet.ranks.init()`; or the name of a module, run as `python -m` with
        `args` as its command line.
    threads_per_rank : cores / ranks by default.
    progress : draw the first rank's `bigunet.progress.Progress`.

    Returns
    -------
    What the function returned on the first rank; None for a module.

    A KeyboardInterrupt (Ctrl-C, a notebook's stop button) asks every rank to stop, waits while a
    training writes its checkpoint, and is raised again.

    Raises
    ------
    LaunchError : a function that other processes cannot import, a rank that failed (with its
        traceback; the others are stopped), or more than `timeout_seconds`. An error of bigunet's
        own is raised again as what it was.
    """
    if ranks < 1:
        fail(LaunchError, rule="there is at least one rank", got=ranks, remedy="Use ranks=1.")
    threads = threads_per_rank or max(1, _cores() // ranks)
    with tempfile.TemporaryDirectory(prefix="bigunet-launch-") as name:
        folder = Path(name)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1"),
            *(f"--nproc-per-node={ranks}", "--max-restarts=0", "--monitor-interval=0.1"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={folder.name}"),
            *("--redirects=3", f"--log-dir={folder / 'logs'}"),
        ]
        if isinstance(target, str):
            command += ["-m", target, *(str(arg) for arg in args)]
        else:
            call = (*_importable(target), tuple(args), dict(kwargs or {}))
            (folder / "call").write_bytes(pickle.dumps(call))
            command += ["-m", "bigunet.launch", str(folder)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            **{name: os.environ.get(name, value) for name, value in _KEEP_MEMORY.items()},
            PROGRESS_FILE: str(folder / "progress"),
            # The ranks import what this process can import.
            "PYTHONPATH": os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")])),
        }
        with (folder / "agent").open("wb") as log:
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with(os.getpid()) if sys.platform == "linux" else None,
            )
        try:
            code = _watch(process, folder / "progress", progress, timeout_seconds)
        except BaseException:
            _stop(process)
            raise
        if code != 0:
            _raise_first(folder, code)
        result = folder / "result"
        return pickle.loads(result.read_bytes()) if result.exists() else None


def _end_with(parent: int) -> Callable[[], None]:
    """What a child runs first, so that the ranks are asked to stop if `parent` dies.

    A kernel that is killed or restarted must not leave a training behind that nobody sees.
    """
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before this was set
            os.kill(os.getpid(), signal.SIGTERM)

    return ask


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _importable(function: Callable[..., Any]) -> tuple[str, str]:
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or "<" in name:
        fail(
            LaunchError,
            rule="a function that runs on ranks can be imported by other processes",
            got=f"{name} of {module}",
            remedy="Put it into a module (a .py file), at the top level.",
        )
    return module, name


def _watch(
    process: subprocess.Popen[bytes], path: Path, shown: bool, timeout_seconds: float | None
) -> int:
    """Draw the progress written to `path` until the agent ends; returns its exit status."""
    began = time.monotonic()
    bar, read = None, 0
    try:
        while True:
            code = process.poll()
            if shown and path.exists():
                with path.open() as file:
                    file.seek(read)
                    text = file.read()
                lines = text[: text.rfind("\n") + 1]
                read += len(lines.encode())
                for line in lines.splitlines()[-1:]:
                    bar = _draw(bar, json.loads(line))
            if code is not None:
                return code
            if timeout_seconds is not None and time.monotonic() - began > timeout_seconds:
                fail(
                    LaunchError,
                    rule=f"the ranks end within {timeout_seconds:g} s",
                    got="a longer run, which was stopped",
                    remedy="Allow more, or give them less to do.",
                )
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
    finally:
        if bar is not None:
            bar.close()


def _draw(bar: Any, line: dict[str, Any]) -> Any:
    text, total = line.pop("text"), line.pop("total")
    done = line.pop("done")
    if bar is None or bar.desc.removesuffix(": ") != text:
        if bar is not None:
            bar.close()
        bar = tqdm(total=total, initial=done, desc=text)
    bar.set_postfix({k: f"{v:.4g}" for k, v in line.items()}, refresh=False)
    bar.update(done - bar.n)
    return bar


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the agent to stop its ranks, which may write a checkpoint first; then insist."""
    for number, seconds in ((signal.SIGTERM, _STOP_SECONDS), (signal.SIGKILL, 10.0)):
        if process.poll() is not None:
            return
        if number == signal.SIGTERM:
            process.send_signal(number)
        else:
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(seconds)


def _raise_first(folder: Path, code: int) -> NoReturn:
    """Raise what the rank that failed first reported."""
    agent = (folder / "agent").read_text(errors="replace")
    for path in _by_age(folder.glob("error-*")):
        error, text = pickle.loads(path.read_bytes())
        if error is not None:
            raise error from LaunchError("every rank ends without an error", text.strip())
        killed = _KILLED.search(agent)
        if killed and "Connection " in text:
            # A rank that was killed reports nothing; the others lose the connection to it.
            name = signal.Signals(int(killed[2])).name
            _fail(code, f"rank {killed[1]}", f"killed by {name} (out of memory?)")
        _fail(code, f"rank {path.name.removeprefix('error-')}", text)
    for path in _by_age(folder.glob("logs/**/error.json")):
        _fail(code, f"rank {path.parent.name}", _callstack(path))
    logs = [(p, p.read_text(errors="replace")) for p in _by_age(folder.glob("logs/**/stderr.log"))]
    logs.sort(key=lambda log: "Traceback" not in log[1])
    for path, text in logs:
        if text.strip():
            _fail(code, f"rank {path.parent.name}", text[-8000:])
    _fail(code, "the launcher", agent[-8000:])


def _callstack(path: Path) -> str:
    """The traceback in one of torchrun's error files, or the file as it is."""
    text = path.read_text(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["message"]["extraInfo"]["py_callstack"])
    return text


def _fail(code: int, who: str, text: str) -> NoReturn:
    raise LaunchError(
        "every rank ends without an error", f"exit status {code}; {who} failed first:\n{text}"
    )


def _by_age(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns)


def _run(folder: Path) -> None:
    """What each rank runs: the pickled call, its result or its error pickled back."""
    module, name, args, kwargs = pickle.loads((folder / "call").read_bytes())
    rank = int(os.environ.get("RANK", "0"))
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        with init():
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                # Before the group is left: that makes the other ranks fail too, later than this.
                _report(folder / f"error-{rank}", error)
                raise
        if rank == 0:
            temporary = folder / "result.part"
            temporary.write_bytes(pickle.dumps(result))
            temporary.rename(folder / "result")
    except Exception as error:
        if not (folder / f"error-{rank}").exists():
            _report(folder / f"error-{rank}", error)
        raise


def _report(path: Path, error: Exception) -> None:
    text = "".join(traceback.format_exception(error))
    kept = error if isinstance(error, BigUNetError) else None
    temporary = path.with_name(f"part-{path.name}")
    temporary.write_bytes(pickle.dumps((kept, text)))
    temporary.rename(path)


if __name__ == "__main__":
    _run(Path(sys.argv[1]))
    # Threads that torch and gloo leave behind can abort the interpreter's own way out
    # ("terminate called without an active exception"), after all the work is done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
