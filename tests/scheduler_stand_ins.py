"""Stand-ins for Slurm's and LSF's commands on one machine: they start ranks, and signal them.

They are no scheduler. They take the options that the generated scripts give, set the variables
that a task would find, and pass signals on, so that those scripts, their rendezvous and their
ranks run for real where there is no batch system.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = ("srun", "scancel", "scontrol", "jsrun", "jskill")


def install(folder: Path) -> dict[str, str]:
    """Put the commands into `folder`; returns the environment in which they are found first."""
    folder.mkdir(exist_ok=True)
    for name in COMMANDS:
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        path.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "BIGUNET_PYTHON": sys.executable,
        "STAND_INS": str(folder),
    }


def run_tasks(command: list[str], variables: list[dict[str, str]]) -> int:
    """One process for each of `variables`; where one fails the others are killed, as by srun."""
    tasks = [
        # A test machine has fewer cores than the node that the script was written for.
        subprocess.Popen(command, env={**os.environ, **own, "OMP_NUM_THREADS": "1"})
        for own in variables
    ]
    pids = Path(os.environ["STAND_INS"]) / "pids"
    pids.write_text(" ".join(str(task.pid) for task in tasks))
    while any(task.poll() is None for task in tasks):
        if any(task.poll() for task in tasks):
            time.sleep(0.5)
            for task in tasks:
                task.kill()
        time.sleep(0.02)
    pids.unlink()
    return max(code if code >= 0 else 128 - code for code in (task.wait() for task in tasks))


def srun(arguments: list[str]) -> int:
    options = {}
    while arguments[0].startswith("-"):
        name, _, value = arguments.pop(0).partition("=")
        options[name] = value
    ranks, per_node = int(options["--ntasks"]), int(options["--ntasks-per-node"])
    assert ranks <= int(options["--nodes"]) * per_node
    return run_tasks(
        arguments,
        [
            {
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank % per_node),
                "SLURM_NTASKS": str(ranks),
            }
            for rank in range(ranks)
        ],
    )


def jsrun(arguments: list[str]) -> int:
    options = {}
    while arguments[0].startswith("-"):
        options[arguments[0]] = arguments[1]
        del arguments[:2]
    sets, per_node = int(options["-n"]), int(options["-r"])
    assert options["-a"] == options["-g"] == "1"
    return run_tasks(
        arguments,
        [
            {
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % per_node),
            }
            for rank in range(sets)
        ],
    )


def signal_tasks(number: int) -> int:
    pids = Path(os.environ["STAND_INS"]) / "pids"
    for pid in pids.read_text().split() if pids.exists() else []:
        os.kill(int(pid), number)
    return 0


def main(name: str, arguments: list[str]) -> int:
    if name == "srun":
        return srun(arguments)
    if name == "jsrun":
        return jsrun(arguments)
    if name == "scancel":
        assert arguments == ["--signal=USR1", os.environ["SLURM_JOB_ID"]]
        return signal_tasks(signal.SIGUSR1)
    if name == "jskill":
        assert arguments == ["-s", "10", "all"]
        return signal_tasks(10)
    if arguments[:2] == ["show", "hostnames"]:
        print("\n".join(arguments[2].split(",")))
        return 0
    assert arguments == ["requeue", os.environ["SLURM_JOB_ID"]]
    (Path(os.environ["STAND_INS"]) / "requeued").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
