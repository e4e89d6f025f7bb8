"""The folder of a training run: what is trained on what, a line a step, checkpoints.

`run.json` says what is trained on what, `history.jsonl` has a line a step, `checkpoints/` the
newest states. A folder goes on only with the run that it belongs to.
"""

from __future__ import annotations

import json
import math
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xarray as xr

from bigunet.checkpoint import check_spec, latest_state, save_state, write_atomically
from bigunet.errors import CheckpointError, OutputError, fail
from bigunet.ranks import Ranks

__all__ = ["RunFolder", "plain_scores", "stop_signals"]


class RunFolder:
    """`path`, as all `ranks` see it; the first one writes."""

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self.path, self.ranks = path, ranks
        self.about = ""

    def open(
        self, about: Mapping[str, Any], *, resume: bool, notes: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """The newest state of the run that `about` describes; None where it has not begun.

        `notes` go into run.json beside it, and may differ from one start to the next.

        Raises
        ------
        OutputError : a state that is not to be resumed, or finished weights without one.
        CheckpointError : a state of another run, or other states on other ranks.
        """
        about = json.loads(json.dumps(about))
        self.about = json.dumps(about)
        state = latest_state(self.path / "checkpoints")
        if state is not None and not resume:
            fail(
                OutputError,
                rule="without resume, the output folder holds no run",
                got=f"{self.path} with a checkpoint of step {state['step']}",
                remedy="Choose another folder, or resume.",
            )
        if state is not None:
            stored = json.loads(state["about"])
            for part, values in about.items():
                check_spec(values, stored.get(part, {}), f"the checkpoints in {self.path}")
        elif (self.path / "weights.safetensors").exists():
            fail(
                OutputError,
                rule="an output folder is empty or holds checkpoints of this run",
                got=f"{self.path} with finished weights and no checkpoint",
                remedy="Choose another folder.",
            )
        step = -1 if state is None else state["step"]
        if self.ranks.share(step) != step:
            fail(
                CheckpointError,
                rule="all ranks read the same checkpoint",
                got=f"step {step} on rank {self.ranks.rank}",
                remedy="Put the run's folder where every rank sees it.",
            )
        self.ranks.wait()
        if self.ranks.first:
            text = json.dumps({**about, **notes}, indent=1)
            write_atomically(self.path / "run.json", lambda path: _write(path, text))
            self._trim(max(step, 0))
        self.ranks.wait()
        return state

    def save(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Write the first rank's `state`; all ranks wait until it is on the disk."""
        if self.ranks.first and state is not None:
            save_state(self.path / "checkpoints", step, {**state, "about": self.about})
        self.ranks.wait()

    def log(self, row: Mapping[str, Any]) -> None:
        """Add a line to the history."""
        if self.ranks.first:
            with (self.path / "history.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")

    def _trim(self, step: int) -> None:
        """Drop lines of steps that will be done again, and a last line cut short by a crash."""
        path = self.path / "history.jsonl"
        if not path.exists():
            return
        kept = []
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                break
            if row["step"] <= step:
                kept.append(line + "\n")
        write_atomically(path, lambda temporary: _write(temporary, "".join(kept)))


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def plain_scores(scores: xr.Dataset) -> dict[str, Any]:
    """Scores for JSON, null for a class that does not occur."""
    names = [n for n in ("mean_iou", "mean_iou_kept", "accuracy") if n in scores]
    values = {n: round(float(scores[n]), 6) for n in names}
    ious = zip(scores["class"].values.tolist(), scores["iou"].values.tolist(), strict=True)
    return {**values, "iou": {n: None if math.isnan(v) else round(v, 6) for n, v in ious}}


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that the first SIGINT, SIGTERM or SIGUSR1 sets.

    A second SIGINT or SIGTERM acts as it did before. SIGUSR1 is a batch system's warning before
    the time limit; it may come more than once, by several ways, and always means the same.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals reach the main thread only; whoever runs us there handles them
        return
    warning = getattr(signal, "SIGUSR1", None)  # Windows has none
    numbers = (signal.SIGINT, signal.SIGTERM, *([] if warning is None else [warning]))
    before = {number: signal.getsignal(number) for number in numbers}

    def handle(number: int, frame: object) -> None:
        stop.set()
        if number != warning:
            signal.signal(number, before[signal.Signals(number)])

    for number in numbers:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number in numbers:
            signal.signal(number, before[number])
