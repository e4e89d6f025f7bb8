"""`bigunet launch`: from a plan to a job, printed, written, submitted, or run here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from bigunet.batch import SITES, Job, Scheduler
from bigunet.batch_script import batch_script
from bigunet.cli.output import Json, emit
from bigunet.errors import LaunchError, OutputError, fail
from bigunet.plan import Plan

__all__ = ["launch"]

_SUBMIT = {"slurm": "sbatch", "lsf": "bsub"}


def launch(
    plan_file: Annotated[Path, typer.Argument(help="A plan in YAML, as `stages --out` writes.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="After --: image and options of `bigunet train`, with its --out."),
    ] = None,
    on: Annotated[str, typer.Option(help="torchrun, slurm or lsf.")] = "torchrun",
    machine: Annotated[str, typer.Option(help=f"{', '.join(SITES)}; the plan's by default.")] = "",
    nodes: Annotated[
        int | None, typer.Option(help="By default as few as have a GPU for every rank.")
    ] = None,
    time: Annotated[str | None, typer.Option(help="Time limit, H:MM[:SS] [default: 1:00]")] = None,
    account: Annotated[str, typer.Option(help="Account or project of the batch system.")] = "",
    queue: Annotated[str, typer.Option(help="Queue, partition or QOS; the usual one.")] = "",
    name: Annotated[str, typer.Option(help="Name of the job.")] = "bigunet",
    restarts: Annotated[
        int, typer.Option(help="Failures in a row without a new checkpoint to start again after.")
    ] = 3,
    out: Annotated[Path | None, typer.Option(help="Write the script, and run nothing.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Print the script, and do nothing.")] = False,
    json: Json = False,
) -> None:
    """Train by a plan on its ranks: torchrun runs here, Slurm and LSF get a job.

    The job starts lost ranks again from the last checkpoint, and goes back into the queue at its
    time limit. `--dry-run` shows the script.
    """
    job = Job(
        plan=Plan.load(plan_file),
        plan_path=str(plan_file),
        arguments=tuple(arguments or ()),
        on=cast(Scheduler, on),
        machine=machine,
        nodes=nodes,
        time=time,
        account=account,
        queue=queue,
        name=name,
        restarts=restarts,
    )
    text = batch_script(job)
    values: dict[str, Any] = {
        "on": job.on,
        "machine": job.site.name if job.site else None,
        "ranks": job.num_ranks,
        "nodes": job.num_nodes,
        "ranks_by_node": job.ranks_by_node,
        "idle_gpus": job.num_idle,
        "script": text,
        "out": None if out is None else str(out),
    }
    if dry_run:
        emit(values, [text.rstrip("\n")], json)
        return
    if out is not None:
        _write(out, text)
        emit(values, [f"Wrote {out}", *_how_to_start(job, out)], json)
        return
    status, said = _submit(job, text) if job.on in _SUBMIT else _run(job, text, json)
    values |= {"exit_status": status, "output": said}
    emit(values, [said] if said else [], json)
    if status:
        raise typer.Exit(status if status > 0 else 1)


def _how_to_start(job: Job, out: Path) -> list[str]:
    if job.on == "slurm":
        return [f"Submit it: sbatch {out}"]
    if job.on == "lsf":
        return [f"Submit it: bsub {out}"]
    if job.num_nodes == 1:
        return [f"Start it: bash {out}"]
    return [f"Start it on node N = 0 ... {job.num_nodes - 1}: bash {out} N FIRST-HOST"]


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
        out.chmod(0o755)
    except OSError as error:
        raise OutputError("the script can be written", error, "Choose a path.") from error


def _submit(job: Job, text: str) -> tuple[int, str]:
    command = _SUBMIT[job.on]
    try:
        done = subprocess.run([command], input=text, capture_output=True, text=True)
    except FileNotFoundError:
        fail(
            LaunchError,
            rule=f"a job is submitted where {command} is",
            got=f"no {command} on PATH",
            remedy="Write the script with --out, or look at it with --dry-run.",
        )
    return done.returncode, (done.stdout + done.stderr).strip()


def _run(job: Job, text: str, quiet: bool) -> tuple[int, str]:
    if job.num_nodes > 1:
        fail(
            LaunchError,
            rule="with torchrun, a job of several nodes is started on each of them",
            got=f"{job.num_nodes} nodes",
            remedy="Write the script with --out, and run it on every node.",
        )
    # The ranks run with this Python, and so import what this process can import.
    process = subprocess.Popen(
        ["bash", "-c", text, "bigunet-launch"],
        env={**os.environ, "BIGUNET_PYTHON": sys.executable},
        stdout=sys.stderr if quiet else None,
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        # It waits while the ranks write their checkpoint.
        signal.signal(number, lambda number, _: process.send_signal(number))
    return process.wait(), ""
