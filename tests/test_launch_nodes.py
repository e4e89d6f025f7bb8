"""Jobs of several nodes, run: two torchrun agents on one machine stand in for two nodes.

Agents and ranks are killed while they train; the job goes on by itself and ends with the weights
of an undisturbed run, bit for bit. Slurm's and LSF's scripts run with stand-ins for `srun` and
`jsrun` (tests/scheduler_stand_ins.py), not under those systems.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import scheduler_stand_ins
import torch

from bigunet.batch import Job
from bigunet.batch_script import batch_script
from bigunet.checkpoint import load_weights
from bigunet.plan import Plan

SCENE = "synthetic:64x96:3"
STEPS = 40
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "BIGUNET_PYTHON": sys.executable}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan of two stages, and the run by it that nobody disturbed."""
    folder = tmp_path_factory.mktemp("launch")
    options = ["--levels", "2", "--convs", "1", "--channels", "4", "--classes", "5"]
    options += ["--scene", SCENE, "--tile", "32", "--batch", "2", "--steps", str(STEPS)]
    options += ["--stages", "2", "--micro-batches", "2", "--out", "plan.yaml"]
    bigunet(["stages", *options], folder)
    bigunet(["train", SCENE, "--plan", "plan.yaml", "--mode", "tiles", "--out", "alone"], folder)
    return folder


def bigunet(arguments: list[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "bigunet", *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def script(place: Path, run: str, **options: object) -> str:
    arguments = (SCENE, "--mode", "tiles", "--out", run, "--save-every", "4", "--quiet")
    plan = Plan.load(place / "plan.yaml")
    job = Job(plan=plan, plan_path="plan.yaml", arguments=arguments, **options)  # type: ignore[arg-type]
    return batch_script(job)


def assert_same_run(place: Path, run: str) -> None:
    """Weights bit for bit, and each step once in the history with the same loss."""
    one, two = (
        dict(load_weights(place / name / "weights.safetensors").model.state_dict())
        for name in ("alone", run)
    )
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    rows = [
        [(row["step"], row["loss"]) for row in map(json.loads, text.splitlines())]
        for text in ((place / name / "history.jsonl").read_text() for name in ("alone", run))
    ]
    assert rows[0] == rows[1]
    assert [step for step, _ in rows[1]] == list(range(1, STEPS + 1))


@contextmanager
def started(
    text: str, place: Path, log: str, *arguments: str, env: dict[str, str] = ENVIRONMENT
) -> Iterator[subprocess.Popen[bytes]]:
    """A running script; whatever is left of it is killed in the end."""
    with (place / log).open("ab") as file:
        process = subprocess.Popen(
            ["bash", "-c", text, "job", *arguments],
            cwd=place,
            env=env,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            left = [*descendants(process.pid)]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            process.kill()
            process.wait()


def descendants(pid: int) -> list[int]:
    done = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    own = [int(line) for line in done.stdout.split()]
    return own + [child for parent in own for child in descendants(parent)]


def wait_for(path: Path, process: subprocess.Popen[bytes], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not any(path.parent.glob(path.name)):
        assert time.monotonic() < end, f"no {path.name} in {seconds} s"
        assert process.poll() is None, "ended too early"
        time.sleep(0.01)


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


# Two agents -------------------------------------------------------------------------------------


def test_two_agents_give_the_weights_of_one(place: Path) -> None:
    text, port = script(place, "two", on="torchrun", nodes=2), free_port()
    with (
        started(text, place, "two-0.log", "0", "127.0.0.1", port) as first,
        started(text, place, "two-1.log", "1", "127.0.0.1", port) as second,
    ):
        assert first.wait(120) == 0, (place / "two-0.log").read_text()
        assert second.wait(30) == 0, (place / "two-1.log").read_text()
    assert_same_run(place, "two")
    assert "starting again" not in (place / "two-0.log").read_text()


@pytest.mark.parametrize(
    ("node", "with_rank"),
    [(0, True), (1, True), (1, False)],
    ids=["the agent with the store, and its rank", "the other, and its rank", "the agent alone"],
)
def test_a_killed_agent_is_replaced_and_changes_nothing(
    place: Path, node: int, with_rank: bool
) -> None:
    run = f"killed-{node}-{with_rank}"
    text, port = script(place, run, on="torchrun", nodes=2), free_port()
    with (
        started(text, place, f"{run}-0.log", "0", "127.0.0.1", port) as first,
        started(text, place, f"{run}-1.log", "1", "127.0.0.1", port) as second,
    ):
        wait_for(place / run / "checkpoints" / "step_*8.ckpt", first)
        agent, *ranks = descendants((first, second)[node].pid)
        assert len(ranks) == 1
        for pid in [agent, *(ranks if with_rank else [])]:
            os.kill(pid, signal.SIGKILL)
        assert not (place / run / "weights.safetensors").exists()
        assert first.wait(120) == 0, (place / f"{run}-0.log").read_text()
        assert second.wait(60) == 0, (place / f"{run}-1.log").read_text()
    assert "status 137; starting again" in (place / f"{run}-{node}.log").read_text()
    assert "starting again" in (place / f"{run}-{1 - node}.log").read_text()
    assert_same_run(place, run)
    assert not [*(place / run).glob(".started-*")]


def test_a_node_that_comes_back_after_the_end_does_not_wait(place: Path) -> None:
    """Its ranks were lost when the others had finished: it takes their word."""
    text = script(place, "late", on="torchrun", nodes=2)
    (place / "late").mkdir()
    stale = place / "late" / ".finished"  # of an earlier job, which must not count
    stale.touch()
    os.utime(stale, (1, 1))
    with started(text, place, "late.log", "1", "127.0.0.1", free_port()) as process:
        wait_for(place / "late" / ".started-*", process)
        time.sleep(0.5)
        (agent, *_) = descendants(process.pid)
        stale.touch()
        os.kill(agent, signal.SIGKILL)
        assert process.wait(30) == 0


# One node ---------------------------------------------------------------------------------------


def test_launch_runs_here(place: Path) -> None:
    arguments = [SCENE, "--mode", "tiles", "--out", "here", "--quiet"]
    values = json.loads(bigunet(["launch", "plan.yaml", "--json", "--", *arguments], place))
    assert (values["ranks"], values["nodes"], values["exit_status"]) == (2, 1, 0)
    assert_same_run(place, "here")


# Batch systems, by stand-ins --------------------------------------------------------------------


def test_a_slurm_job_restarts_requeues_and_goes_on(place: Path) -> None:
    """A rank killed, then the warning before the time limit, then the job's second time."""
    bin_folder = place / "slurm-bin"
    env = scheduler_stand_ins.install(bin_folder)
    env |= {"SLURM_JOB_ID": str(random.randrange(20000)), "SLURM_JOB_NODELIST": "127.0.0.1,other"}
    text = script(place, "slurm", on="slurm", machine="perlmutter", nodes=2)
    checkpoints = place / "slurm" / "checkpoints"
    with started(text, place, "slurm.log", env=env) as job:
        wait_for(checkpoints / "step_*8.ckpt", job)
        os.kill(int((bin_folder / "pids").read_text().split()[1]), signal.SIGKILL)
        wait_for(checkpoints / "step_00000016.ckpt", job)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(60) != 0
    assert "status 137; starting again" in (place / "slurm.log").read_text()
    assert (bin_folder / "requeued").exists()
    assert not (place / "slurm" / "weights.safetensors").exists()
    (bin_folder / "requeued").unlink()
    with started(text, place, "slurm.log", env=env) as job:
        assert job.wait(120) == 0, (place / "slurm.log").read_text()
    assert not (bin_folder / "requeued").exists()
    assert_same_run(place, "slurm")


def test_an_lsf_job_is_warned_twice_and_goes_on(place: Path) -> None:
    """By LSF itself, to each of its processes, and by the script."""
    env = scheduler_stand_ins.install(place / "lsf-bin")
    hosts = place / "hosts"
    hosts.write_text("batch5\n127.0.0.1\n127.0.0.1\nother\n")
    env |= {"LSB_JOBID": str(random.randrange(20000)), "LSB_DJOB_HOSTFILE": str(hosts)}
    text = script(place, "lsf", on="lsf", machine="summit", account="abc123")
    with started(text, place, "lsf.log", env=env) as job:
        wait_for(place / "lsf" / "checkpoints" / "step_*8.ckpt", job)
        job.send_signal(signal.SIGUSR1)
        for pid in descendants(job.pid)[:1]:
            os.kill(pid, signal.SIGUSR1)
        assert job.wait(60) == 99, (place / "lsf.log").read_text()
    assert not (place / "lsf" / "weights.safetensors").exists()
    with started(text, place, "lsf.log", env=env) as job:
        assert job.wait(120) == 0, (place / "lsf.log").read_text()
    assert_same_run(place, "lsf")


def test_a_job_that_gets_nowhere_is_not_queued_again(place: Path) -> None:
    """A warning before the first checkpoint: the next time would end the same way."""
    bin_folder = place / "nowhere-bin"
    env = scheduler_stand_ins.install(bin_folder)
    env |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "127.0.0.1"}
    text = script(place, "nowhere", on="slurm", machine="frontier", account="abc123")
    with started(text, place, "nowhere.log", env=env) as job:
        wait_for(bin_folder / "pids", job)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(60) == 1
    assert "not queued again" in (place / "nowhere.log").read_text()
    assert not (bin_folder / "requeued").exists()
