"""Ranks as processes: results, progress, the first failure, and stopping."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from rank_work import add, fail_on, train_in_parts, train_long

from bigunet.errors import LaunchError, SceneError
from bigunet.launch import launch


def test_two_ranks_give_a_result_and_progress(capsys: pytest.CaptureFixture[str]) -> None:
    result = launch(add, (3,), {"b": 4}, ranks=2, threads_per_rank=1)
    assert result == (7, 2, 3.0, "1")
    err = capsys.readouterr().err
    assert "adding" in err
    assert "5/5" in err


def test_the_first_failure_is_brought_back_and_the_others_stopped() -> None:
    with pytest.raises(LaunchError, match="rank 1 failed first") as caught:
        launch(fail_on, (1, "raise"), ranks=2, threads_per_rank=1, progress=False)
    assert "ZeroDivisionError: raised on rank 1" in str(caught.value)
    assert "in fail_on" in str(caught.value)


def test_a_rank_that_is_killed_is_named() -> None:
    with pytest.raises(LaunchError, match="rank 0 failed first:\nkilled by SIGKILL"):
        launch(fail_on, (0, "kill"), ranks=2, threads_per_rank=1, progress=False)


def test_an_error_of_ours_comes_back_as_it_was() -> None:
    with pytest.raises(SceneError, match="a rule; got a value") as caught:
        launch(fail_on, (0, "bigunet"), ranks=1, threads_per_rank=1, progress=False)
    assert "in fail_on" in str(caught.value.__cause__)


def test_a_stopped_training_can_be_resumed(tmp_path: Path) -> None:
    """Ctrl-C here stops the ranks, which finish their step and write a checkpoint."""

    def interrupt() -> None:
        while not (tmp_path / "history.jsonl").exists():
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        launch(train_long, (str(tmp_path),), ranks=2, threads_per_rank=1, progress=False)
    thread.join()
    rows = (tmp_path / "history.jsonl").read_text().splitlines()
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert saved.name == f"step_{json.loads(rows[-1])['step']:08d}.ckpt"


def test_ranks_stop_and_save_where_their_parent_is_killed(tmp_path: Path) -> None:
    """A kernel that is killed must not leave a training behind that nobody sees."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from rank_work import train_long\nfrom bigunet.launch import launch\n"
        "launch(train_long, (sys.argv[2],), ranks=2, threads_per_rank=1, progress=False)"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)]
    parent = subprocess.Popen(command)
    history = tmp_path / "history.jsonl"
    while not (history.exists() and history.read_text()):
        assert parent.poll() is None
        time.sleep(0.1)
    ranks = psutil.Process(parent.pid).children(recursive=True)
    assert len(ranks) >= 3  # the agent and two ranks
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert saved.name.endswith(".ckpt")


def test_a_module_runs_like_a_command(tmp_path: Path) -> None:
    assert launch("json.tool", ("--help",), ranks=1, progress=False) is None
    with pytest.raises(LaunchError, match="No module named no_such_module"):
        launch("no_such_module", ranks=1, progress=False)


def test_what_cannot_be_launched() -> None:
    with pytest.raises(LaunchError, match="at least one rank"):
        launch(add, ranks=0)
    with pytest.raises(LaunchError, match="Put it into a module"):
        launch(lambda: None, ranks=1)


def test_too_long_a_run_is_stopped() -> None:
    began = time.monotonic()
    with pytest.raises(LaunchError, match="end within 1 s"):
        launch(train_in_parts, ("unused", [None]), ranks=1, progress=False, timeout_seconds=1)
    assert time.monotonic() - began < 60
