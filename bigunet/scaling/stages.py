"""Pipelines of stages, one or several side by side, as `bigunet.pipeline` runs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import numpy as np
from numpy.typing import NDArray

from bigunet.balance import balance
from bigunet.cost import RowCosts
from bigunet.cuts import CutProblem, peak_bytes, step_seconds, transfer_bytes
from bigunet.geometry import padded_size
from bigunet.layers import LayerRow, layer_table
from bigunet.machines import Link, Machine
from bigunet.planner import cut_problem
from bigunet.scaling.collective import members_of
from bigunet.scaling.messages import message_sizes
from bigunet.scaling.sample_parallel import kinds_of, reading, timed
from bigunet.scaling.setting import Outcome, Setting, misfit, sum_of, terms_of, unfit
from bigunet.search import best_cuts
from bigunet.stage_memory import row_memory
from bigunet.tiles import Tile, check_core, inner_tile

__all__ = ["StageWork", "default_micro_batches", "default_stages", "stage_work", "stages"]

# Micro-batches a stage by default: GPipe keeps its bubble below a fifth with four (Huang et al.
# 2019, arXiv 1811.06965).
_MICRO_BATCHES = 4
# The planner's search takes long for more; then stages are balanced by their time only.
_MOST_PLANNED = 16
Ints = NDArray[np.int64]
_FREE = Link("same device", math.inf)


def default_stages(setting: Setting, gpus: int) -> int:
    """Stages of one pipeline: a node's GPUs, or fewer where there are fewer."""
    return min(gpus, setting.machine.num_devices)


def default_micro_batches(num_stages: int, share: int) -> int:
    """Micro-batches for a pipeline of so many stages with `share` batches of tiles to run."""
    return max(1, min(_MICRO_BATCHES * num_stages, share))


@dataclass(frozen=True, slots=True)
class StageWork:
    """One pass of one pipeline: `micro_batches` batches of equal tiles through its stages.

    Seconds of the pass and of what it would be: `even` with equal stages and no transfers,
    `uneven` with the true stages, `busy` the mean work of a device. `parameters` are those of
    each stage, `peaks` the bytes of its device.
    """

    seconds: float
    even: float
    uneven: float
    busy: float
    cuts: tuple[int, ...]
    parameters: tuple[int, ...]
    peaks: tuple[int, ...]
    sent_bytes: float


def read_box(setting: Setting, tile: int) -> tuple[tuple[int, int], Tile | None]:
    """The read boxes of equal tiles (`bigunet.pipeline`), and their crops where they are cropped.

    Boxes are shifted inward at the border, so that all have one size. With several tiles in a
    micro-batch the decoder is not cropped; nor is it counted as cropped here where the image is
    narrower than a tile with its halo.
    """
    spec, train = setting.spec, setting.train
    sides = check_core(tile, spec)
    padded = tuple(padded_size(n, spec.stride) for n in setting.shape)
    kinds_of(setting, tile)  # checks the size
    margin = padded_size(spec.halo if train.halo is None else train.halo, spec.stride)
    read = (min(sides[0] + 2 * margin, padded[0]), min(sides[1] + 2 * margin, padded[1]))
    key = ("inner", tile)
    if key not in setting.memo:
        setting.memo[key] = inner_tile(tile, spec, halo=train.halo, cropped=setting.cropped)
    inner = cast(Tile, setting.memo[key])
    crops = setting.cropped and train.batch == 1 and inner.read.shape == read
    return read, inner if crops else None


def stage_work(
    setting: Setting, tile: int, num_stages: int, micro_batches: int, pipelines: int
) -> StageWork | None:
    """The pass with the best cuts, or None where there are fewer layers than stages.

    Cuts are the planner's: the shortest step in which every stage fits by the planner's memory
    model, an estimate (`bigunet.stage_memory`); for "1f1b" those that are best for "gpipe".
    Without `search` stages are balanced by their seconds, or by their bytes where those do not
    fit.
    """
    read, crops = read_box(setting, tile)
    period = _crossing(setting.machine, num_stages, pipelines)
    key: tuple[object, ...] = ("stages", read, crops is None, tile, num_stages, micro_batches)
    key = (*key, period, setting.search)
    if key not in setting.memo:
        setting.memo[key] = _stage_work(setting, tile, num_stages, micro_batches, pipelines)
    return cast("StageWork | None", setting.memo[key])


def _crossing(machine: Machine, num_stages: int, pipelines: int) -> int:
    """Pipelines until the places of their stages on nodes repeat."""
    period = machine.num_devices // math.gcd(num_stages, machine.num_devices)
    return min(pipelines, period)


def _slowest_link(machine: Machine, num_stages: int, pipelines: int) -> Callable[[int, int], Link]:
    """The link between two stages in the pipeline where it is slowest."""
    period = _crossing(machine, num_stages, pipelines)

    def link(a: int, b: int) -> Link:
        links = [machine.link(r * num_stages + a, r * num_stages + b) for r in range(period)]
        return max(links, key=lambda e: e.latency_seconds + 2**20 / e.bytes_per_second)

    return link


def _stage_work(
    setting: Setting, tile: int, num_stages: int, micro_batches: int, pipelines: int
) -> StageWork | None:
    read, crops = read_box(setting, tile)
    table, one = _one_micro_batch(setting, read, crops)
    if num_stages > len(table):
        return None
    problem = replace(
        one,
        devices=tuple(range(num_stages)),
        micro_batches=micro_batches,
        link=_slowest_link(setting.machine, num_stages, pipelines),
    )
    return _work(problem, table, _cuts(setting, problem, (read, crops is None, num_stages)))


def _one_micro_batch(
    setting: Setting, read: tuple[int, int], crops: Tile | None
) -> tuple[tuple[LayerRow, ...], CutProblem]:
    """The layers of one micro-batch, and the problem of one stage: kept for any number of both."""
    spec, train = setting.spec, setting.train
    key = ("one", read, crops is None)
    if key not in setting.memo:
        table = layer_table(spec, (train.batch, spec.in_channels, *read), tile=crops)
        problem = cut_problem(
            table,
            setting.cost,
            train=train,
            devices=(0,),
            micro_batches=1,
            schedule=setting.schedule,
            machine=setting.machine,
            memory=row_memory(spec, tile=crops, device=setting.device),
        )
        setting.memo[key] = table, problem
    return cast("tuple[tuple[LayerRow, ...], CutProblem]", setting.memo[key])


def _cuts(setting: Setting, problem: CutProblem, key: tuple[object, ...]) -> tuple[int, ...]:
    """Searched, or balanced: by seconds, or where those do not fit by bytes.

    What is balanced does not depend on the number of micro-batches, and is kept under `key`.
    """
    num = problem.num_stages
    costs = problem.costs
    if setting.search and num <= _MOST_PLANNED:
        best = best_cuts(replace(problem, schedule="gpipe"))
        if best is not None:
            return best.cuts
    seconds = costs.forward_seconds + costs.backward_seconds
    even = _kept(setting, ("by seconds", *key), lambda: balance(seconds.tolist(), num))
    if peak_bytes(problem, np.array(even)).max() <= problem.memory_limit:
        return even
    stage_bytes = problem.stage_bytes
    assert stage_bytes is not None
    first = np.arange(len(seconds))

    def by_bytes() -> tuple[int, ...]:
        held = _MICRO_BATCHES * num
        weights = stage_bytes(first, first + 1, in_flight=held, stage=0)
        return balance([float(w) for w in weights], num)

    # More than fits in all, however it is cut: no use to look for the best way.
    whole = stage_bytes(0, len(seconds), in_flight=1, stage=0)
    if not setting.search and whole > num * problem.memory_limit:
        return even
    return _kept(setting, ("by bytes", *key), by_bytes)


def _kept(
    setting: Setting, key: tuple[object, ...], make: Callable[[], tuple[int, ...]]
) -> tuple[int, ...]:
    if key not in setting.memo:
        setting.memo[key] = make()
    return cast("tuple[int, ...]", setting.memo[key])


def _work(problem: CutProblem, table: Sequence[LayerRow], cuts: tuple[int, ...]) -> StageWork:
    at = np.array([cuts])
    even, uneven = _without_transfers(problem, at)
    sent = sum(float(b[0]) for b in transfer_bytes(problem, at).values())
    return StageWork(
        float(step_seconds(problem, at)[0]),
        even,
        uneven,
        float(problem.work_before[-1]) / problem.num_stages,
        cuts,
        tuple(sum(row.parameters for row in table[a:b]) for a, b in pairwise(cuts)),
        tuple(int(b) for b in peak_bytes(problem, at)[0]),
        2 * problem.micro_batches * sent,
    )


def _without_transfers(problem: CutProblem, at: Ints) -> tuple[float, float]:
    """Seconds with equal stages, and with the true ones, where sending costs nothing."""
    num, more = problem.num_stages, problem.micro_batches - 1
    if problem.exact_closed_form and problem.recompute in ("none", "block"):
        # The closed form of `bigunet.cuts.step_seconds` without its links.
        forward = np.diff(problem.forward_before[at[0]])
        backward = np.diff(problem.backward_before[at[0]])
        total = float(forward.sum() + backward.sum())
        return total * (1 + more / num), total + more * float(forward.max() + backward.max())
    nothing = np.zeros_like(problem.output_bytes)
    free = replace(problem, link=_no_link, skips=(), output_bytes=nothing)
    costs = problem.costs
    # As many equal rows as stages.
    equal = replace(
        free,
        costs=RowCosts(
            np.full(num, costs.forward_seconds.sum() / num),
            np.full(num, costs.backward_seconds.sum() / num),
        ),
        output_bytes=np.zeros(num, dtype=np.int64),
    )
    even = step_seconds(equal, np.arange(num + 1)[None])
    return float(even[0]), float(step_seconds(free, at)[0])


def _no_link(_source: int, _target: int) -> Link:
    return _FREE


def stages(
    setting: Setting,
    gpus: int,
    tile: int,
    num_stages: int | None = None,
    micro_batches: int | None = None,
    *,
    most: int | None = None,
    only_fitting: bool = False,
) -> Outcome:
    """Pipelines, at most `most`, of `num_stages` stages over `gpus` GPUs; GPUs left over idle."""
    spec, train, machine = setting.spec, setting.train, setting.machine
    num = default_stages(setting, gpus) if num_stages is None else num_stages
    images = setting.num_images(gpus)
    kinds = kinds_of(setting, tile)
    num_tiles = kinds.num_tiles * images
    if num > gpus:
        return unfit(
            gpus, 0, f"{num} stages need {num} GPUs", tile=tile, stages=num, num_tiles=num_tiles
        )
    pipelines = gpus // num if most is None else min(most, gpus // num)
    # Tiles are dealt in turn; the pipeline with most of them sets the pace.
    share = -(-num_tiles // pipelines)
    batches = -(-share // train.batch)
    count = default_micro_batches(num, batches) if micro_batches is None else micro_batches
    work = stage_work(setting, tile, num, count, pipelines)
    if work is None:
        return unfit(
            gpus, 0, f"{num} stages, and fewer layers", tile=tile, stages=num, num_tiles=num_tiles,
            pipelines=pipelines, micro_batches=count,
        )  # fmt: skip
    rounds = -(-batches // count)
    peak, have = max(work.peaks), machine.processor.memory_bytes
    if only_fitting and peak > have:
        return unfit(gpus, peak, f"a stage {misfit(peak, have)}", tile=tile, stages=num)

    # What a tile costs, without and with its halo, shared out over all GPUs.
    again = {"none": 0.0, "block": 1.0, "stage": 1.0, "except_last": 1 - 1 / count}
    forward, backward = timed(setting, tile)(train.batch, True)
    bare = forward * (1 + again[train.recompute]) + backward
    compute = float(bare @ kinds.count) * images / train.batch / gpus
    useful = num_tiles * work.busy * num / (count * train.batch) / gpus
    exposed, sent = _reduce(setting, work, pipelines, num, num_tiles)

    box, _ = read_box(setting, tile)
    image_bytes = spec.in_channels * setting.pixel_bytes
    each_read = image_bytes * box[0] * box[1]
    labels = 2 * setting.shape[0] * setting.shape[1] * images
    on_node = min(pipelines, max(1, machine.num_devices // num))
    read = num_tiles * each_read + labels
    at = work.peaks.index(peak)
    return Outcome(
        gpus,
        terms_of(
            compute=compute,
            halo_redundancy=useful - compute,
            imbalance=rounds * (work.busy + work.uneven - work.even) - useful,
            update=setting.update_seconds(max(work.parameters)),
            all_reduce=exposed,
            bubble=rounds * (work.even - work.busy),
            transfers=rounds * (work.seconds - work.uneven),
            reading=reading(
                setting, on_node * (share * each_read + labels / num_tiles * share), read
            ),
        ),
        peak,
        feasible=peak <= have,
        reason="" if peak <= have else f"stage {at} of {num} {misfit(peak, have)}",
        idle_gpus=gpus - num * min(pipelines, num_tiles),
        num_tiles=num_tiles,
        tile=tile,
        stages=num,
        pipelines=pipelines,
        micro_batches=count,
        all_reduce_bytes=sent,
        transfer_bytes=work.sent_bytes * rounds * min(pipelines, num_tiles),
        read_bytes=read,
        read_pixels=num_tiles * box[0] * box[1],
    )


def _reduce(
    setting: Setting, work: StageWork, pipelines: int, num: int, num_tiles: int
) -> tuple[float, tuple[float, float, float]]:
    """Seconds and bytes of the sums of each stage's gradients over the pipelines.

    All stages sum at once and share what a node sends out; the slowest counts in full, though
    the last stages are through with their work before the first.
    """
    machine = setting.machine
    sharing = min(num, machine.num_devices)
    sent = np.zeros(3)
    slowest = 0.0
    for stage, parameters in enumerate(work.parameters):
        members = members_of(pipelines, machine.num_devices, machine.per_socket, num, stage)
        seconds = 0.0
        for size in message_sizes(parameters):
            found = sum_of(setting, members, size, sharing)
            seconds += found.seconds
            sent += found.link_bytes
        slowest = max(slowest, seconds)
    return slowest, (float(sent[0]), float(sent[1]), float(sent[2]))
