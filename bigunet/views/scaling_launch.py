"""From the best choice of ScalingExplorer to a plan, and to the job that runs it."""

from __future__ import annotations

import shlex
from itertools import pairwise

from bigunet.batch import SITES, Job
from bigunet.batch_script import batch_script
from bigunet.layers import layer_table
from bigunet.plan import Plan
from bigunet.scaling import Candidate, Choice
from bigunet.scaling.setting import Outcome
from bigunet.scaling.stages import read_box, stage_work
from bigunet.views.scaling_tables import ScalingSetting, ScalingState, choice_of

__all__ = ["best_plan", "job_of", "launch_line", "run_script"]

_ARGUMENTS = ("scene.tif", "--labels", "labels.tif", "--out", "run")
# To be replaced by the reader's own; some centres refuse a job without one.
_ACCOUNT = "ACCOUNT"


def best_plan(setting: ScalingSetting, state: ScalingState) -> Plan | None:
    """The fastest choice that can be run, as a plan; None where nothing fits.

    "halo-exchange" is a model only, so that the runner-up stands in. Sample-parallel is a plan of
    one stage: every rank a pipeline of its own. Stages are balanced by time.
    """
    choice = choice_of(setting, state)
    if isinstance(choice, str):
        return None
    found = _runs(choice)
    if found is None:
        return None
    candidate, outcome = found
    model = setting.model(state)
    assert candidate.tile is not None
    train = state.train.replace(tile=candidate.tile)
    read, _ = read_box(model, candidate.tile)
    stages, batches = candidate.stages or 1, candidate.micro_batches or 1
    shape = (batches * train.batch, state.spec.in_channels, *read)
    names = [row.name for row in layer_table(state.spec, shape)]
    cuts: tuple[int, ...] = (0, len(names))
    pipelines = outcome.pipelines if stages > 1 else state.gpus - outcome.idle_gpus
    if stages > 1:
        work = stage_work(model, candidate.tile, stages, batches, pipelines)
        assert work is not None
        cuts = work.cuts
    machine, _ = setting.machine(state.machine)
    return Plan(
        spec=state.spec,
        train=train,
        shape_BCHW=shape,
        stages=tuple((names[a], names[b - 1]) for a, b in pairwise(cuts)),
        devices=tuple(range(stages)),
        micro_batches=batches,
        schedule="gpipe",
        tiles=pipelines,
        scene_shape=(state.image, state.image),
        machine=machine.name,
    )


def _runs(choice: Choice) -> tuple[Candidate, Outcome] | None:
    """The best, or the runner-up where the best is a model only."""
    if choice.strategy != "halo-exchange":
        return choice.best, choice.outcome
    if choice.runner_up is None or choice.runner_up_outcome is None:
        return None
    return choice.runner_up, choice.runner_up_outcome


def _options(setting: ScalingSetting, state: ScalingState, plan: Plan) -> dict[str, str]:
    machine, _ = setting.machine(state.machine)
    site = SITES.get(machine.name)
    if site is not None:
        more = {"account": _ACCOUNT} if site.account_needed else {}
        return {"on": site.scheduler, "machine": site.name, **more}
    nodes = -(-plan.num_ranks // machine.num_devices)
    return {"on": "torchrun", **({"nodes": str(nodes)} if nodes > 1 else {})}


def job_of(setting: ScalingSetting, state: ScalingState, plan: Plan) -> Job:
    """The job that trains by the plan, saved as plan.yaml, under the machine's batch system."""
    options = _options(setting, state, plan)
    nodes = options.pop("nodes", None)
    return Job(
        plan=plan, plan_path="plan.yaml", arguments=_ARGUMENTS,
        nodes=None if nodes is None else int(nodes), **options,  # type: ignore[arg-type]
    )  # fmt: skip


def launch_line(setting: ScalingSetting, state: ScalingState, plan: Plan) -> str:
    """The `bigunet launch` command for it."""
    options = [f"--{name}={value}" for name, value in _options(setting, state, plan).items()]
    return shlex.join(["bigunet", "launch", "plan.yaml", *options, "--", *_ARGUMENTS])


def run_script(setting: ScalingSetting, state: ScalingState, plan: Plan) -> str:
    """The script that `launch_line` would submit."""
    return batch_script(job_of(setting, state, plan))
