"""A job that trains by a plan: how many ranks on how many nodes, under which batch system.

One rank a GPU. `Job` checks everything that can be known before a job waits in a queue;
`bigunet.batch_script` writes the job's script.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from bigunet.errors import LaunchError, fail
from bigunet.machines import MACHINES
from bigunet.plan import Plan

__all__ = ["SITES", "WARNING_SECONDS", "Job", "Scheduler", "Site"]

Scheduler = Literal["torchrun", "slurm", "lsf"]

WARNING_SECONDS = 120
"""A job hears so long before its time limit that it should write its checkpoint."""

# A job that ends less than this after its warning could not have trained.
_LEAST_SECONDS = 2 * WARNING_SECONDS
# What a launcher decides, or what a job that is to go on must not have.
_NOT_HERE = ("--plan", "--ranks", "--engine", "--threads", "--no-resume")
_PLAIN = re.compile(r"[A-Za-z0-9][\w.+-]*")


@dataclass(frozen=True, slots=True)
class Site:
    """How one machine's batch system is asked for one rank a GPU.

    Parameters
    ----------
    cores_per_rank : physical cores, and so OpenMP threads.
    directives : lines for the head of the script; `{queue}` stands for the queue.
    step : options of `srun` or `jsrun`, beside the numbers of nodes and ranks.
    environment : variables to export.
    account_needed : whether a job without an account is refused.
    source : where all this is written.
    """

    name: str
    scheduler: Scheduler
    cores_per_rank: int
    queue: str
    directives: tuple[str, ...]
    step: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    account_needed: bool
    source: str

    @property
    def gpus_per_node(self) -> int:
        """What its batch system counts as GPUs: on Frontier, the dies of an MI250X."""
        return MACHINES[self.name].num_devices


SITES: Mapping[str, Site] = {
    site.name: site
    for site in (
        Site(
            "perlmutter",
            "slurm",
            16,
            "regular",
            ("--constraint=gpu", "--qos={queue}", "--gpus-per-node=4"),
            # 64 cores of two threads each: 32 "CPUs" of Slurm's a rank. All four GPUs are visible
            # to every rank, which picks its own by LOCAL_RANK: NCCL needs that for its peers.
            ("--cpus-per-task=32", "--gpus-per-node=4", "--gpu-bind=none"),
            (("SLURM_CPU_BIND", "cores"),),
            False,
            "docs.nersc.gov: running jobs on Perlmutter's GPU nodes",
        ),
        Site(
            "frontier",
            "slurm",
            7,
            "batch",
            ("--partition={queue}",),
            ("--cpus-per-task=7", "--gpus-per-task=1", "--gpu-bind=closest"),
            (("NCCL_SOCKET_IFNAME", "hsn0,hsn1,hsn2,hsn3"),),
            True,
            "docs.olcf.ornl.gov: Frontier user guide (one task a GPU); PyTorch on Frontier",
        ),
        Site(
            "summit",
            "lsf",
            7,
            "batch",
            ("-q {queue}",),
            ("-a", "1", "-c", "7", "-g", "1", "-b", "packed:7"),
            (),
            True,
            "docs.olcf.ornl.gov: Summit user guide; ibm.com/docs: bsub -wa, -wt and -Q, jskill",
        ),
    )
}
"""Machines whose batch system is known, by name. Summit was switched off in November 2024; its
kind of system, LSF with jsrun, is in use elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A plan, and where it is to be trained.

    Parameters
    ----------
    plan, plan_path : the plan, and its file as the job will find it.
    arguments : of `bigunet train`, with `--out`; `--plan` is added.
    on : "torchrun", "slurm" or "lsf".
    machine : one of `SITES`; the plan's own where it has that batch system. Not needed for
        torchrun.
    nodes : by default the fewest that have a GPU for every rank; 1 for torchrun.
    time : the time limit, as H:MM or H:MM:SS; for Slurm and LSF.
    account, queue : of the batch system.
    restarts : how often in a row ranks are started again after a failure that left no newer
        checkpoint than the last.

    Raises
    ------
    LaunchError : naming every fault.
    """

    plan: Plan
    plan_path: str
    arguments: tuple[str, ...]
    on: Scheduler
    machine: str = ""
    nodes: int | None = None
    time: str | None = None
    account: str = ""
    queue: str = ""
    name: str = "bigunet"
    restarts: int = 3

    def __post_init__(self) -> None:
        faults = [*self._site_faults()]
        if not faults:
            faults += self._node_faults()
        faults += [*self._limit_faults(), *self._argument_faults()]
        if faults:
            fail(
                LaunchError,
                rule="a job can start: " + "; ".join(faults),
                remedy="Change these options; `bigunet launch --help` lists them.",
            )

    # Faults ------------------------------------------------------------------------------------

    def _site_faults(self) -> list[str]:
        if self.on not in get_args(Scheduler):
            return [f"--on is one of {', '.join(get_args(Scheduler))}, not {self.on!r}"]
        fitting = [name for name, site in SITES.items() if site.scheduler == self.on]
        if self.machine and self.machine not in SITES:
            return [f"--machine is one of {', '.join(SITES)}, not {self.machine!r}"]
        if self.on == "torchrun":
            return []
        if self.site is None:
            made_for = f" (the plan was made for {self.plan.machine})" if self.plan.machine else ""
            return [f"{self.on} needs --machine: {' or '.join(fitting)}{made_for}"]
        if self.site.scheduler != self.on:
            return [f"{self.site.name} has {self.site.scheduler}, not {self.on}"]
        return []

    def _node_faults(self) -> list[str]:
        ranks, site, faults = self.num_ranks, self.site, []
        if self.nodes is not None and self.nodes < 1:
            return [f"--nodes is at least 1, not {self.nodes}"]
        of_plan = (
            f"the plan has {ranks} places ({self.plan.tiles} x {self.plan.num_devices} "
            "tiles x devices), a GPU each"
        )
        if site is not None and self.num_nodes * site.gpus_per_node < ranks:
            need = -(-ranks // site.gpus_per_node)
            faults.append(
                f"{of_plan}, and {self.num_nodes} nodes of {site.name} have "
                f"{self.num_nodes * site.gpus_per_node}: ask for {need} nodes"
            )
        elif 0 in self.ranks_by_node:
            faults.append(
                f"{of_plan}: {self.ranks_by_node.count(0)} of {self.num_nodes} nodes would have "
                f"none; ask for {-(-ranks // self.ranks_per_node)} nodes or fewer"
            )
        return faults

    def _limit_faults(self) -> list[str]:
        faults = []
        if self.on == "torchrun":
            given = [n for n in ("time", "account", "queue") if getattr(self, n)]
            faults += [f"torchrun knows no --{name}" for name in given]
        elif self.time is not None:
            seconds = _seconds(self.time)
            if seconds is None:
                faults.append(f"--time is H:MM or H:MM:SS, such as 2:00, not {self.time!r}")
            elif seconds < _LEAST_SECONDS:
                faults.append(
                    f"--time is at least {_LEAST_SECONDS // 60} minutes, of which the last "
                    f"{WARNING_SECONDS // 60} are for the checkpoint, not {self.time}"
                )
        for name in ("account", "queue", "name"):
            value = getattr(self, name)
            if value and not _PLAIN.fullmatch(value):
                faults.append(f"--{name} is letters, digits and . _ + -, not {value!r}")
        if self.on != "torchrun" and self.site and self.site.account_needed and not self.account:
            faults.append(f"{self.site.name} needs --account")
        if self.restarts < 0:
            faults.append(f"--restarts is at least 0, not {self.restarts}")
        return faults

    def _argument_faults(self) -> list[str]:
        names = [a.partition("=")[0] for a in self.arguments]
        faults = [f"{n} is not for `bigunet train` here" for n in _NOT_HERE if n in names]
        if self.run_folder is None:
            faults.append(
                "arguments of `bigunet train` follow after --, with its --out: "
                "-- scene.tif --labels labels.tif --out run"
            )
        if any("\0" in a or "\n" in a for a in (*self.arguments, self.plan_path)):
            faults.append("arguments and paths have no line breaks")
        return faults

    # Read-outs ---------------------------------------------------------------------------------

    @property
    def site(self) -> Site | None:
        """The machine, where one is known."""
        if self.machine:
            return SITES.get(self.machine)
        site = SITES.get(self.plan.machine)
        return site if site is not None and site.scheduler == self.on else None

    @property
    def num_ranks(self) -> int:
        return self.plan.num_ranks

    @property
    def num_nodes(self) -> int:
        if self.nodes is not None:
            return self.nodes
        if self.on == "torchrun" and not self.machine:
            return 1
        return -(-self.num_ranks // self.site.gpus_per_node) if self.site else 1

    @property
    def ranks_per_node(self) -> int:
        """On every node but the last, which may have fewer."""
        return -(-self.num_ranks // self.num_nodes)

    @property
    def ranks_by_node(self) -> tuple[int, ...]:
        """Ranks of each node: consecutive ones, so that a pipeline's devices stay together."""
        most, left = self.ranks_per_node, self.num_ranks
        counts = []
        for _ in range(self.num_nodes):
            counts.append(min(most, left))
            left -= counts[-1]
        return tuple(counts)

    @property
    def num_idle(self) -> int:
        """GPUs of the job's nodes without a rank; 0 where the machine is not known."""
        if self.site is None:
            return 0
        return self.num_nodes * self.site.gpus_per_node - self.num_ranks

    @property
    def time_seconds(self) -> int:
        """The time limit; an hour by default."""
        seconds = _seconds(self.time) if self.time is not None else None
        return 3600 if seconds is None else seconds

    @property
    def run_folder(self) -> str | None:
        """The folder of the run: the value of `--out` among the arguments."""
        found = None
        for i, argument in enumerate(self.arguments):
            if argument == "--out" and i + 1 < len(self.arguments):
                found = self.arguments[i + 1]
            elif argument.startswith("--out="):
                found = argument.removeprefix("--out=")
        return found or None


def _seconds(text: str) -> int | None:
    """Seconds of H:MM or H:MM:SS; None for anything else."""
    match = re.fullmatch(r"(\d{1,4}):([0-5]\d)(?::([0-5]\d))?", text)
    if match is None:
        return None
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return 3600 * hours + 60 * minutes + seconds
