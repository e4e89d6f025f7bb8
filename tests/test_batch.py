"""Jobs from plans: nodes, ranks and faults, against counts done by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bigunet.batch import SITES, Job
from bigunet.errors import LaunchError
from bigunet.layers import layer_table
from bigunet.plan import Plan
from bigunet.spec import TrainSpec, UNetSpec

SPEC = UNetSpec(levels=3, channels=4, classes=5)
ARGUMENTS = ("scene.tif", "--labels", "labels.tif", "--out", "runs/one")


def plan(devices: int = 2, tiles: int = 1, machine: str = "") -> Plan:
    """`tiles` pipelines of `devices` stages each."""
    names = [row.name for row in layer_table(SPEC, (2, 3, 64, 64))]
    starts = [len(names) * i // devices for i in range(devices)]
    ends = [*starts[1:], len(names)]
    return Plan(
        spec=SPEC,
        train=TrainSpec(batch=2),
        shape_BCHW=(2, 3, 64, 64),
        stages=tuple((names[a], names[b - 1]) for a, b in zip(starts, ends, strict=True)),
        devices=tuple(range(devices)),
        micro_batches=2,
        tiles=tiles,
        machine=machine,
    )


def job(of: Plan | None = None, **options: Any) -> Job:
    values: dict[str, Any] = {"on": "slurm", "machine": "perlmutter", "arguments": ARGUMENTS}
    return Job(plan=of or plan(), plan_path="plan.yaml", **{**values, **options})


@pytest.mark.parametrize(
    ("machine", "devices", "tiles", "nodes", "by_node", "idle"),
    [
        ("perlmutter", 2, 1, 1, (2,), 2),
        ("perlmutter", 4, 3, 3, (4, 4, 4), 0),
        ("perlmutter", 3, 2, 2, (3, 3), 2),  # a pipeline of three stays on one node
        ("perlmutter", 7, 1, 2, (4, 3), 1),
        ("frontier", 4, 4, 2, (8, 8), 0),
        ("frontier", 3, 3, 2, (5, 4), 7),
        ("summit", 6, 256, 256, (6,) * 256, 0),
    ],
)
def test_ranks_are_dealt_to_the_fewest_nodes(
    machine: str, devices: int, tiles: int, nodes: int, by_node: tuple[int, ...], idle: int
) -> None:
    made = job(plan(devices, tiles), machine=machine, on=SITES[machine].scheduler, account="abc123")
    assert made.num_nodes == nodes
    assert made.ranks_by_node == by_node
    assert sum(by_node) == made.num_ranks == devices * tiles
    assert made.num_idle == idle


def test_the_machine_is_the_plan_s_where_its_batch_system_is_asked_for() -> None:
    of = plan(machine="frontier")
    made = job(of, machine="", account="abc123")
    assert made.site is SITES["frontier"]
    with pytest.raises(LaunchError, match=r"lsf needs --machine: summit \(the plan was made"):
        job(of, machine="", on="lsf")
    assert job(of, machine="", on="torchrun").site is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"on": "pbs"}, "--on is one of torchrun, slurm, lsf, not 'pbs'"),
        ({"machine": "aurora"}, "--machine is one of perlmutter, frontier, summit, not 'aurora'"),
        ({"machine": ""}, "slurm needs --machine: perlmutter or frontier"),
        ({"machine": "summit"}, "summit has lsf, not slurm"),
        ({"nodes": 0}, "--nodes is at least 1"),
        ({"nodes": 3}, r"the plan has 2 places \(1 x 2 .*1 of 3 nodes would have none; ask for 2"),
        ({"nodes": 1, "plan": plan(5)}, "5 places .* 1 nodes of perlmutter have 4: ask for 2"),
        ({"time": "90"}, "--time is H:MM or H:MM:SS"),
        ({"time": "1:75"}, "not '1:75'"),
        ({"time": "-1:00"}, "not '-1:00'"),
        ({"time": "0:03"}, "--time is at least 4 minutes"),
        ({"machine": "frontier"}, "frontier needs --account"),
        ({"account": "a b"}, "--account is letters"),
        ({"queue": "x\n#SBATCH --mail-user=me"}, "--queue is letters"),
        ({"on": "torchrun", "time": "1:00"}, "torchrun knows no --time"),
        ({"arguments": ("scene.tif",)}, "with its --out"),
        ({"arguments": (*ARGUMENTS, "--plan", "other.yaml")}, "--plan is not for `bigunet train`"),
        ({"arguments": (*ARGUMENTS, "--ranks=4")}, "--ranks is not for"),
        ({"arguments": (*ARGUMENTS, "a\nb")}, "no line breaks"),
        ({"restarts": -1}, "--restarts is at least 0"),
    ],
)
def test_what_cannot_start_is_said_before_anything_is_written(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(LaunchError, match=said):
        job(options.pop("plan", None), **options)


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(LaunchError) as caught:
        job(time="soon", nodes=9, arguments=())
    for part in ("--time is", "7 of 9 nodes", "with its --out"):
        assert part in str(caught.value)


def test_limits_in_seconds() -> None:
    assert job().time_seconds == 3600
    assert job(time="2:00").time_seconds == 7200
    assert job(time="100:00:01").time_seconds == 360001
    assert job(arguments=("a.tif", "--out=x", "--out", "y z")).run_folder == "y z"


# The command ------------------------------------------------------------------------------------


def launch(
    folder: Path, *arguments: str, ok: bool = True, **env: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "bigunet", "launch", *arguments],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0) == ok, done.stderr
    return done


def test_dry_run_prints_and_out_writes_the_same_script(tmp_path: Path) -> None:
    plan(2, 2).save(tmp_path / "plan.yaml")
    options = ["plan.yaml", "--on", "slurm", "--machine", "perlmutter", "--time", "2:00"]
    printed = launch(tmp_path, *options, "--dry-run", "--", *ARGUMENTS).stdout
    assert [p.name for p in tmp_path.iterdir()] == ["plan.yaml"]
    values = json.loads(launch(tmp_path, *options, "--dry-run", "--json", "--", *ARGUMENTS).stdout)
    assert values["script"] == printed
    assert (values["ranks"], values["nodes"], values["idle_gpus"]) == (4, 1, 0)
    said = launch(tmp_path, *options, "--out", "job.sh", "--", *ARGUMENTS).stdout
    assert "sbatch job.sh" in said
    assert (tmp_path / "job.sh").read_text() == printed
    assert os.access(tmp_path / "job.sh", os.X_OK)


def test_a_job_is_submitted_where_there_is_a_batch_system(tmp_path: Path) -> None:
    """`sbatch` is a stand-in that keeps what it reads and answers as Slurm does."""
    plan().save(tmp_path / "plan.yaml")
    options = ["plan.yaml", "--on", "slurm", "--machine", "perlmutter"]
    bare = {"PATH": "nowhere"}
    said = launch(tmp_path, *options, "--", *ARGUMENTS, ok=False, **bare).stderr
    assert "no sbatch on PATH" in said
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\ncat > submitted.sh\necho Submitted batch job 7\n")
    sbatch.chmod(0o755)
    found = {"PATH": f"{sbatch.parent}{os.pathsep}{os.environ['PATH']}"}
    done = launch(tmp_path, *options, "--", *ARGUMENTS, **found)
    assert done.stdout == "Submitted batch job 7\n"
    dry = launch(tmp_path, *options, "--dry-run", "--", *ARGUMENTS).stdout
    assert (tmp_path / "submitted.sh").read_text() == dry


def test_the_command_refuses_what_cannot_run(tmp_path: Path) -> None:
    text = plan().to_yaml()
    (tmp_path / "plan.yaml").write_text(text)
    (tmp_path / "old.yaml").write_text(text.replace("bigunet_plan: 1", "bigunet_plan: 0"))
    for arguments, said in (
        (["old.yaml", "--out", "job.sh"], "this release reads plans of version"),
        (["none.yaml", "--out", "job.sh"], "a plan's file can be read"),
        (["plan.yaml", "--nodes", "2"], "is started on each of them"),
        (["plan.yaml", "--on", "pbs", "--out", "job.sh"], "--on is one of"),
    ):
        done = launch(tmp_path, *arguments, "--", *ARGUMENTS, ok=False)
        assert done.returncode == 2
        assert said in done.stderr
    assert not (tmp_path / "job.sh").exists()
    (tmp_path / "folder").mkdir()
    done = launch(tmp_path, "plan.yaml", "--out", "folder", "--", *ARGUMENTS, ok=False)
    assert "the script can be written" in done.stderr
