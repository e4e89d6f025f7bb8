"""The script of a job: for Slurm, LSF, or torchrun on one or several nodes.

All three share a loop. It starts the ranks, waits, and starts them again from the last checkpoint
where one was lost. SIGUSR1, which a batch system sends before the time limit, makes the ranks
write a checkpoint and stop; the job is then put back into the queue and goes on from there.

`RANK` and `LOCAL_RANK` are set in the script, from what `srun` or `jsrun` tell a task, and not
guessed in Python: in an interactive allocation those variables exist without there being ranks.
"""

from __future__ import annotations

import shlex

from bigunet.batch import WARNING_SECONDS, Job
from bigunet.plan import Plan

__all__ = ["batch_script", "torchrun_command"]

_REQUEUE = 99
_PAUSE_SECONDS = 3
# The port of the first rank's store, by the job's number; below Linux's range of ports for
# outgoing connections, which begins at 32768.
_PORT = "$((10000 + ({job} + attempt) % 20000))"


def batch_script(job: Job) -> str:
    """The script as text. It runs where it is submitted or started; paths are as given."""
    write = {"slurm": _slurm, "lsf": _lsf, "torchrun": _torchrun}[job.on]
    return write(job)


def torchrun_command(plan: Plan, plan_path: str, arguments: tuple[str, ...]) -> str:
    """The command, in one line, that trains by a plan on one node, without restarts."""
    return shlex.join(["torchrun", *_agent(plan.num_ranks), *_train(plan_path, arguments)])


def _agent(ranks: int) -> list[str]:
    # A free port, so that two jobs on one machine cannot collide.
    return ["--standalone", f"--nproc-per-node={ranks}"]


def _train(plan_path: str, arguments: tuple[str, ...]) -> list[str]:
    return ["-m", "bigunet", "train", *arguments, "--plan", plan_path]


# Parts that all scripts have --------------------------------------------------------------------


def _head(job: Job, directives: list[str]) -> str:
    plan = job.plan
    where = f" of {job.site.name}" if job.site else ""
    idle = f", {job.num_idle} of whose GPUs stay idle" if job.num_idle else ""
    return "\n".join(
        [
            "#!/bin/bash",
            *directives,
            f"# {job.num_ranks} ranks ({plan.tiles} x {plan.num_devices} tiles x devices), one a "
            f"GPU, on {job.num_nodes} node{'s' * (job.num_nodes > 1)}{where}{idle}.",
            "# Written by `bigunet launch`. Submitted again, it goes on from the last checkpoint.",
            "# shellcheck disable=SC2016  # quoted as they are meant",
            "set -u",
            "",
            f"run={shlex.quote(job.run_folder or '')}",
            "python=${BIGUNET_PYTHON:-python}",
            f"train=({shlex.join(_train(job.plan_path, job.arguments))})",
        ]
    )


def _loop(job: Job, start: str, forward: str, trapped: str, end: str, before: str = "") -> str:
    """Start, wait, and start again. `forward` tells the ranks to stop, `end` ends a stopped job.

    A trapped signal interrupts `wait`, so it is called until the process is gone. Failures in a
    row count only while the newest checkpoint stays the same.
    """
    return f"""
newest() {{
    local file last=none
    for file in "$run"/checkpoints/step_*.ckpt; do
        if [ -e "$file" ]; then last=$file; fi
    done
    printf '%s' "$last"
}}

stopping=0 step=
# shellcheck disable=SC2317,SC2329  # called by the trap; older versions and newer ones
stop() {{
    stopping=1
    {forward}
}}
trap stop {trapped}

begun=$(newest)
known=$begun attempt=0 failures=0 status=1
while [ "$stopping" = 0 ]; do
{before}{start}
    step=$!
    while kill -0 "$step" 2>/dev/null; do
        wait "$step"
        status=$?
    done
    if [ "$status" = 0 ] || [ "$stopping" = 1 ]; then break; fi
    if [ "$(newest)" = "$known" ]; then failures=$((failures + 1)); else failures=1; fi
    known=$(newest) attempt=$((attempt + 1))
    if [ "$failures" -gt {job.restarts} ]; then
        echo "bigunet: gave up after $failures failures without a new checkpoint" >&2
        break
    fi
    echo "bigunet: ranks ended with status $status; starting again, checkpoint: $known" >&2
    sleep {_PAUSE_SECONDS}
done

{end}"""


def _requeue(command: str) -> str:
    """The end of a batch job: back into the queue after a stop, if it got anywhere."""
    return f"""\
if [ "$status" != 0 ] && [ "$stopping" = 1 ]; then
    if [ "$(newest)" = "$begun" ]; then
        echo "bigunet: no checkpoint within the time limit; not queued again" >&2
        exit 1
    fi
    {command}
fi
exit "$status"
"""


def _ranks(rank: str, local_rank: str) -> str:
    """Words that set a task's rank from its launcher's variables and become the training."""
    inner = f'export RANK=${rank} LOCAL_RANK=${local_rank}; exec "$@"'
    return f'bash -c {shlex.quote(inner)} rank "$python" "${{train[@]}}"'


def _world(job: Job) -> str:
    assert job.site is not None
    lines = [
        f"export WORLD_SIZE={job.num_ranks} OMP_NUM_THREADS={job.site.cores_per_rank}",
        *(f"export {name}={shlex.quote(value)}" for name, value in job.site.environment),
    ]
    return "\n".join(lines)


# The three systems ------------------------------------------------------------------------------


def _slurm(job: Job) -> str:
    site = job.site
    assert site is not None
    options = [
        f"--job-name={job.name}",
        *([f"--account={job.account}"] if job.account else []),
        *(d.format(queue=job.queue or site.queue) for d in site.directives),
        f"--nodes={job.num_nodes}",
        f"--ntasks-per-node={job.ranks_per_node}",
        f"--time={_clock(job.time_seconds)}",
        # To this script alone (B), which passes it on; a job that is put back keeps its log.
        f"--signal=B:USR1@{WARNING_SECONDS}",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.out",
    ]
    head = _head(job, [f"#SBATCH {option}" for option in options])
    world = _world(job)
    step = shlex.join(
        [
            "srun",
            f"--nodes={job.num_nodes}",
            f"--ntasks={job.num_ranks}",
            f"--ntasks-per-node={job.ranks_per_node}",
            *site.step,
            "--kill-on-bad-exit=1",
        ]
    )
    start = f"""\
    MASTER_PORT={_PORT.format(job="SLURM_JOB_ID")}
    export MASTER_PORT
    {step} \\
        {_ranks("SLURM_PROCID", "SLURM_LOCALID")} &"""
    loop = _loop(
        job,
        start,
        'scancel --signal=USR1 "$SLURM_JOB_ID"  # to the ranks, not to this script',
        "USR1",
        _requeue('scontrol requeue "$SLURM_JOB_ID"'),
    )
    return f"""{head}

{world}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
{loop}"""


def _lsf(job: Job) -> str:
    site = job.site
    assert site is not None
    minutes = -(-job.time_seconds // 60)
    options = [
        f"-J {job.name}",
        f"-P {job.account}",
        *(d.format(queue=job.queue or site.queue) for d in site.directives),
        f"-nnodes {job.num_nodes}",
        f"-W {minutes // 60}:{minutes % 60:02d}",
        "-wa USR1",
        f"-wt {WARNING_SECONDS // 60}",
        # A job that ends with this status is put back into the queue.
        f"-Q {_REQUEUE}",
        f"-o {job.name}-%J.out",
    ]
    head = _head(job, [f"#BSUB {option}" for option in options])
    step = shlex.join(
        ["jsrun", "-n", str(job.num_ranks), "-r", str(job.ranks_per_node), *site.step]
    )
    start = f"""\
    MASTER_PORT={_PORT.format(job="LSB_JOBID")}
    export MASTER_PORT
    # LSF warns every process of the job here; jsrun itself is to go on.
    (
        trap '' USR1
        exec {step} \\
            {_ranks("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")}
    ) &"""
    loop = _loop(
        job,
        start,
        "jskill -s 10 all  # SIGUSR1 to the ranks",
        "USR1",
        _requeue(f"exit {_REQUEUE}"),
    )
    return f"""{head}

{_world(job)}
# The first host is the one that runs this script, without a GPU.
MASTER_ADDR=$(uniq "$LSB_DJOB_HOSTFILE" | grep -v '^batch' | head -n 1)
export MASTER_ADDR
{loop}"""


def _torchrun(job: Job) -> str:
    # The agent's signal would leave the ranks 30 s; they are told themselves.
    forward = 'if [ -n "$step" ]; then pkill -USR1 -P "$step" || kill -TERM "$step"; fi'
    signals = "USR1 TERM INT"
    head = f"""{_head(job, [])}

# The cores of this node, shared by its ranks.
threads=$(($(nproc) / {job.ranks_per_node}))
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}}"""
    agent = ["-m", "torch.distributed.run"]
    if job.num_nodes == 1:
        words = shlex.join([*agent, *_agent(job.num_ranks)])
        start = f'    "$python" {words} "${{train[@]}}" &'
        loop = _loop(job, start, forward, signals, 'exit "$status"\n')
        return f"{head}\n{loop}"
    counts = " ".join(str(n) for n in job.ranks_by_node)
    before = """\
    if [ "$run/.finished" -nt "$started" ]; then
        status=0
        break
    fi
"""
    start = f"""\
    "$python" {shlex.join(agent)} --nnodes={job.num_nodes} --node-rank="$node" \\
        --nproc-per-node="${{ranks[$node]}}" --master-addr="$first" --master-port="$port" \\
        --max-restarts=0 "${{train[@]}}" &"""
    end = """\
if [ "$status" = 0 ]; then touch "$run/.finished"; fi
exit "$status"
"""
    loop = _loop(job, start, forward, signals, end, before)
    last = job.num_nodes - 1
    return f"""{head}

# On every node: bash THIS-SCRIPT NODE FIRST-HOST [PORT], with NODE = 0 ... {last}.
ranks=({counts})
node=${{1:?number of this node, 0 to {last}}}
first=${{2:?name or address of node 0}}
port=${{3:-29400}}
case $node in
    {"|".join(str(n) for n in range(job.num_nodes))}) ;;
    *) echo "bigunet: NODE is 0 to {last}, not $node" >&2; exit 2 ;;
esac

# A node whose ranks were lost after the others had finished must not wait for them.
mkdir -p -- "$run"
started=$(mktemp "$run/.started-XXXXXX")
trap 'rm -f -- "$started"' EXIT
{loop}"""


def _clock(seconds: int) -> str:
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
