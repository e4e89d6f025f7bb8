"""Scripts as text: they pass shellcheck, quote what users name, and ask for what is planned.

tests/test_launch_nodes.py runs them.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_batch import ARGUMENTS, job, plan

from bigunet.batch import SITES, Job
from bigunet.batch_script import batch_script, torchrun_command
from bigunet.plan import Plan

AWKWARD = ("my scene's $HOME.tif", "--labels", 'a"b;`id`.tif', "--out", "runs/& one")

JOBS: list[tuple[str, dict[str, Any]]] = [
    ("perlmutter", {"on": "slurm", "machine": "perlmutter"}),
    ("frontier", {"on": "slurm", "machine": "frontier", "account": "abc123"}),
    ("summit", {"on": "lsf", "machine": "summit", "account": "abc123"}),
    ("one node", {"on": "torchrun", "machine": ""}),
    ("nodes", {"on": "torchrun", "machine": "", "nodes": 2}),
]


def directives(text: str, word: str) -> list[str]:
    """The lines a batch system reads: those before the first that is no comment."""
    return re.findall(rf"^#{word} (.*)$", text.partition("\nset -u")[0], re.M)


def step(text: str, command: str) -> list[str]:
    """The words of the line that starts the ranks, up to the task's own command."""
    (line,) = re.findall(rf"^ +(?:exec )?({command} .*) \\$", text, re.M)
    return shlex.split(line)


@pytest.mark.parametrize(("name", "options"), JOBS, ids=[name for name, _ in JOBS])
@pytest.mark.parametrize("arguments", [ARGUMENTS, AWKWARD], ids=["plain", "awkward"])
@pytest.mark.parametrize("of", [plan(3, 1), plan(4, 3)], ids=["3 ranks", "12 ranks"])
def test_scripts_pass_shellcheck(
    name: str, options: dict[str, Any], arguments: tuple[str, ...], of: Plan
) -> None:
    text = batch_script(job(of, arguments=arguments, **options))
    # The one that is pinned, not another on the machine.
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run(
        [shellcheck, "--severity=style", "-"], input=text, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    # bash finds the arguments again, word by word.
    line = next(part for part in text.splitlines() if part.startswith("train=("))
    shown = subprocess.run(
        ["bash", "-c", f'{line}\nprintf "%s\\0" "${{train[@]}}"'], capture_output=True, text=True
    )
    words = shown.stdout.split("\0")[:-1]
    assert words == ["-m", "bigunet", "train", *arguments, "--plan", "plan.yaml"]


def test_slurm_on_perlmutter() -> None:
    text = batch_script(job(plan(3, 2), account="m1234_g", time="2:30", queue="debug"))
    lines = directives(text, "SBATCH")
    for line in (
        "--account=m1234_g", "--constraint=gpu", "--qos=debug", "--gpus-per-node=4", "--nodes=2",
        "--ntasks-per-node=3", "--time=02:30:00", "--signal=B:USR1@120", "--requeue",
        "--open-mode=append",
    ):  # fmt: skip
        assert line in lines
    assert step(text, "srun")[1:] == [
        "--nodes=2", "--ntasks=6", "--ntasks-per-node=3", "--cpus-per-task=32",
        "--gpus-per-node=4", "--gpu-bind=none", "--kill-on-bad-exit=1",
    ]  # fmt: skip
    assert "export WORLD_SIZE=6 OMP_NUM_THREADS=16" in text
    assert "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID" in text
    assert 'scontrol requeue "$SLURM_JOB_ID"' in text


def test_slurm_on_frontier() -> None:
    text = batch_script(job(plan(4, 4), machine="frontier", account="abc123"))
    lines = directives(text, "SBATCH")
    assert {"--account=abc123", "--partition=batch", "--nodes=2", "--time=01:00:00"} <= {*lines}
    assert step(text, "srun")[1:] == [
        "--nodes=2", "--ntasks=16", "--ntasks-per-node=8", "--cpus-per-task=7",
        "--gpus-per-task=1", "--gpu-bind=closest", "--kill-on-bad-exit=1",
    ]  # fmt: skip
    assert "OMP_NUM_THREADS=7" in text
    assert "NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3" in text


def test_lsf_with_jsrun() -> None:
    """1536 ranks on 256 nodes of six, as many as the paper had."""
    text = batch_script(
        job(plan(6, 256), on="lsf", machine="summit", account="abc123", time="2:00:30")
    )
    lines = directives(text, "BSUB")
    for line in ("-P abc123", "-q batch", "-nnodes 256", "-W 2:01", "-wa USR1", "-wt 2", "-Q 99"):
        assert line in lines
    assert step(text, "jsrun")[1:] == "-n 1536 -r 6 -a 1 -c 7 -g 1 -b packed:7".split()
    assert "RANK=$OMPI_COMM_WORLD_RANK LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK" in text
    assert "exit 99" in text


def test_torchrun_on_nodes_of_unequal_ranks() -> None:
    text = batch_script(job(plan(5), on="torchrun", machine="", nodes=2))
    assert "ranks=(3 2)" in text
    for word in ("--nnodes=2", '--nproc-per-node="${ranks[$node]}"', "--max-restarts=0"):
        assert word in text


def test_torchrun_in_one_line_is_what_the_script_runs() -> None:
    of = plan(2, 2)
    words = shlex.split(torchrun_command(of, "my plan.yaml", AWKWARD))
    assert words[:3] == ["torchrun", "--standalone", "--nproc-per-node=4"]
    assert words[3:] == ["-m", "bigunet", "train", *AWKWARD, "--plan", "my plan.yaml"]
    text = batch_script(Job(plan=of, plan_path="p.yaml", arguments=AWKWARD, on="torchrun"))
    assert (
        '"$python" -m torch.distributed.run --standalone --nproc-per-node=4 "${train[@]}"' in text
    )


def test_ports_of_jobs_and_attempts_are_below_outgoing_ones() -> None:
    """Linux gives ports from 32768 on to outgoing connections."""
    text = batch_script(job())
    (line,) = re.findall(r"MASTER_PORT=(.*)", text)
    ports = set()
    for number in (1, 9999, 12345678, 2**31 - 1):
        for attempt in (0, 1):
            code = f"SLURM_JOB_ID={number}; attempt={attempt}; echo {line}"
            done = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
            ports.add(int(done.stdout))
    assert len(ports) == 8
    assert min(ports) >= 10000
    assert max(ports) < 32768


def test_every_site_says_where_it_is_documented() -> None:
    assert {site.scheduler for site in SITES.values()} == {"slurm", "lsf"}
    for name, site in SITES.items():
        assert site.name == name
        assert ".gov" in site.source
