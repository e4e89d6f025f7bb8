"""`memory`: the predicted bytes of one training step, by layer and cause and along the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from bigunet.errors import PlanError, ShapeError, fail
from bigunet.layers import LayerRow, Shape, layer_table
from bigunet.machines import Device
from bigunet.machines import device as device_of
from bigunet.memory.causes import (
    BUFFERS,
    CAUSES,
    GRADIENTS,
    INPUT,
    LABEL_BYTES,
    TEMPORARIES,
    Format,
    buffer_bytes,
    format_of,
    optimiser_bytes,
    parameter_counts,
    rounded,
)
from bigunet.memory.run import StepRun, replay_step
from bigunet.memory.segments import check_stages, cut, segments
from bigunet.memory.tape import PHASES
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import Tile

__all__ = ["memory", "peak_bytes"]

Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Job:
    """One call's arguments, checked."""

    spec: UNetSpec
    train: TrainSpec
    rows: tuple[LayerRow, ...]
    image: Shape
    batch: int
    tile: Tile | None
    form: Format
    stages: tuple[int, ...]
    together: bool
    chunks: int
    in_flight: int | None
    keep_gradients: bool
    fake: bool
    workspace: bool


def memory(
    spec: UNetSpec,
    shape_BCHW: Shape,
    train: TrainSpec,
    *,
    tile: Tile | None = None,
    stages: Sequence[int] | None = None,
    together: bool = False,
    chunks: int = 1,
    in_flight: int | None = None,
    keep_gradients: bool = False,
    device: str | Device | None = None,
    fake: bool = False,
    workspace: bool = False,
) -> xr.Dataset:
    """Bytes of one training step in its steady state (the optimiser's state exists).

    The step sets the gradients to none, runs forward, the loss, backward and the optimiser.

    Parameters
    ----------
    shape_BCHW : batch, bands, height and width of the images or, with `tile`, of the tiles' pixels
        (`tile.read.shape`). The batch is this shape's, not `train.batch`.
    stages : layers in each stage, in order; each stage has a device of its own, or, `together`,
        they share one and only say what is recomputed as a unit.
    chunks : micro-batches that the batch is cut into.
    in_flight : micro-batches that a stage has open at once: all by default, as in GPipe.
    keep_gradients : gradients are kept from step to step and added to, not set to none.
    device : its name (see `bigunet.machines`); CUDA devices round sizes up to 512 bytes and update
        all parameters at once. Plain CPU storages by default.
    fake : follow what fake tensors do in the few places where they differ from real ones; for
        comparison with a traced step.
    workspace : count the work space of convolutions, too: on CUDA the transformed filters of
        Winograd convolutions (3 x 3 only, 4 times the weight), which cuDNN may choose on GPUs
        without tensor cores; on a CPU oneDNN's copies of the maps. A traced step has none.

    Returns
    -------
    Dataset with `held` (layer, cause): what is there when the forward pass of the first
    micro-batch ends, each tensor once, by the layer that keeps it (gradients: what they will be;
    temporaries: the largest that the layer makes); `live` (moment, cause): at the highest point
    of each operation of the step; `peak` (stage) and `at_peak` (stage, cause). All in bytes.

    Raises
    ------
    ShapeError : for a shape the network cannot take, or too large for 64 bits.
    PlanError : for stages, chunks or micro-batches in flight that cannot be.
    SpecError : for an unknown device.
    """
    job = _job(
        spec, shape_BCHW, train, tile, stages, together, chunks, in_flight, keep_gradients, device,
        fake, workspace,
    )  # fmt: skip
    runs = [_stage(job, k) for k in range(1 if together else len(job.stages))]
    return _dataset(job, runs, device)


def peak_bytes(
    spec: UNetSpec,
    shape_BCHW: Shape,
    train: TrainSpec,
    *,
    tile: Tile | None = None,
    stages: Sequence[int] | None = None,
    together: bool = False,
    chunks: int = 1,
    in_flight: int | None = None,
    keep_gradients: bool = False,
    device: str | Device | None = None,
    workspace: bool = False,
) -> tuple[int, ...]:
    """The peak of each device alone; `memory` without its tables. Arguments and errors as there."""
    job = _job(
        spec, shape_BCHW, train, tile, stages, together, chunks, in_flight, keep_gradients, device,
        False, workspace,
    )  # fmt: skip
    peaks = []
    for k in range(1 if together else len(job.stages)):
        run, fixed, _ = _stage(job, k)
        _, delta = run.tape.deltas()
        peaks.append(int(fixed.sum() + max(0, int(np.cumsum(delta).max(initial=0)))))
    return tuple(peaks)


def _job(
    spec: UNetSpec,
    shape: Shape,
    train: TrainSpec,
    tile: Tile | None,
    stages: Sequence[int] | None,
    together: bool,
    chunks: int,
    in_flight: int | None,
    keep_gradients: bool,
    device: str | Device | None,
    fake: bool,
    workspace: bool,
) -> _Job:
    shape = _check_shape(shape)
    batch, bands, height, width = shape
    if chunks < 1 or chunks > batch:
        fail(
            PlanError,
            rule=f"a batch of {batch} is cut into 1 to {batch} micro-batches",
            got=chunks,
            remedy="Change the batch or the number of micro-batches.",
        )
    if in_flight is not None and not 1 <= in_flight <= chunks:
        fail(
            PlanError,
            rule=f"1 to {chunks} micro-batches are in flight, as many as there are",
            got=in_flight,
            remedy="Leave it out for GPipe's schedule.",
        )
    cuda = device is not None and device_of(device).cuda
    # The largest micro-batch decides.
    image = (-(-batch // chunks), bands, height, width)
    rows = layer_table(spec, image, tile=tile)
    sizes = (len(rows),) if stages is None else check_stages(stages, len(rows))
    return _Job(
        spec, train, rows, image, batch, tile, format_of(train, cuda), sizes, together, chunks,
        in_flight, keep_gradients, fake, workspace,
    )  # fmt: skip


def _check_shape(shape: Sequence[int]) -> Shape:
    ok = len(shape) == 4 and all(isinstance(n, int | np.integer) and n >= 1 for n in shape)
    if not ok:
        fail(
            ShapeError,
            rule="a shape is batch, bands, height and width, four integers of at least 1",
            got=tuple(shape),
            remedy="Change the sizes.",
        )
    batch, bands, height, width = (int(n) for n in shape)
    return batch, bands, height, width


def _stage(job: _Job, k: int) -> tuple[StepRun, Int, Int]:
    """Stage `k` replayed, with what it holds throughout by cause, and by (layer, cause)."""
    train, mode = job.train, job.train.recompute
    if job.together:
        start, stop = 0, len(job.rows)
        parts = segments(job.rows, mode, job.stages)
    else:
        ends = [0, *accumulate(job.stages)]
        start, stop = ends[k], ends[k + 1]
        parts = (cut(job.rows, job.stages)[k],)
        if mode == "block":
            parts = segments(parts[0].rows, mode)
    if mode == "none":
        parts = cut(job.rows[start:stop], (stop - start,))
    chunks = job.chunks
    run = replay_step(
        job.spec,
        train,
        job.rows,
        job.image,
        job.form,
        parts,
        start,
        tile=job.tile,
        recompute=mode != "none",
        recompute_last=mode in ("block", "stage"),
        in_flight=job.in_flight or chunks,
        keep_gradients=job.keep_gradients,
        fake=job.fake,
        workspace=job.workspace,
    )
    table = _fixed(job, start, stop)
    fixed = table.sum(axis=0)
    if not job.keep_gradients:
        fixed[GRADIENTS] = 0
    return run, fixed, table


def _fixed(job: _Job, start: int, stop: int) -> Int:
    """Bytes by (layer, cause) that stay for the whole step; gradients are listed, too."""
    form, train = job.form, job.train
    quantum, weight = form.quantum, form.weight
    table = np.zeros((len(job.rows), len(CAUSES)), dtype=np.int64)
    for i in range(start, stop):
        row = job.rows[i]
        if row.parameters:
            counts = parameter_counts(job.spec, row)
            size = rounded([n * weight for n in counts], quantum)
            state = optimiser_bytes(train, counts, form) if train.optimiser != "sgd" else 0
            table[i] = (size, 0, size, state, size if train.average else 0, 0, 0, 0, 0, 0)
        if row.buffers:
            table[i, BUFFERS] = buffer_bytes(row, form)
    _, bands, height, width = job.image
    if start == 0:
        element = 4 if form.autocast else form.value
        table[0, INPUT] += rounded((job.batch * bands * height * width * element,), quantum)
    if stop == len(job.rows):
        if job.tile is not None:
            height, width = job.tile.out.shape
        table[-1, INPUT] += rounded((job.batch * height * width * LABEL_BYTES,), quantum)
    return table


def _dataset(
    job: _Job, runs: Sequence[tuple[StepRun, Int, Int]], device: str | Device | None
) -> xr.Dataset:
    num_rows, num_causes = len(job.rows), len(CAUSES)
    held = np.zeros((num_rows, num_causes), dtype=np.int64)
    live: list[Int] = []
    ops: list[Int] = []
    peaks, at_peak, moments = [], [], []
    for run, fixed, table in runs:
        tape = run.tape
        number, delta = tape.deltas()
        cause = np.frombuffer(tape.cause, dtype=np.int64)[number]
        total = np.concatenate(([0], np.cumsum(delta))) + fixed.sum()
        marks = np.frombuffer(tape.ops, dtype=np.int64).reshape(-1, 4)
        tops = _tops(total, marks[:, 0])
        levels = np.tile(fixed, (len(tops), 1))
        for k in np.unique(cause):
            levels[:, k] += np.concatenate(([0], np.cumsum(np.where(cause == k, delta, 0))))[tops]
        offset = sum(len(part) for part in live)
        live.append(levels)
        ops.append(marks)
        highest = int(np.argmax(total[tops]))
        peaks.append(int(total[tops[highest]]))
        at_peak.append(levels[highest])
        moments.append(offset + highest)
        kept = tape.held(num_rows, run.after_forward)
        kept[:, TEMPORARIES] = tape.largest(num_rows)
        kept[:, GRADIENTS] = 0
        held += kept + table
    marks = np.concatenate(ops)
    stage_of_row = np.repeat(np.arange(len(job.stages)), job.stages)
    stage_of_moment = np.repeat(np.arange(len(runs)), [len(part) for part in ops])
    names = [row.name for row in job.rows]
    blocks = [row.block for row in job.rows]
    attrs: dict[str, object] = {
        "units": "bytes",
        "precision": job.train.precision,
        "optimiser": job.train.optimiser,
        "recompute": job.train.recompute,
        "shape": (job.batch, *job.image[1:]),
        "micro_batches": job.chunks,
    }
    if device is not None:
        known = device_of(device)
        attrs |= {"device": known.name, "capacity_bytes": known.memory_bytes}
    units = {"units": "bytes"}
    return xr.Dataset(
        {
            "held": (("layer", "cause"), held, units),
            "live": (("moment", "cause"), np.concatenate(live), units),
            "peak": (("stage",), np.asarray(peaks), units),
            "at_peak": (("stage", "cause"), np.stack(at_peak), units),
            "peak_moment": (("stage",), np.asarray(moments)),
            "moment_layer": (("moment",), marks[:, 1]),
            "moment_phase": (("moment",), marks[:, 2]),
            "moment_micro_batch": (("moment",), marks[:, 3]),
            "moment_stage": (("moment",), stage_of_moment),
            "layer_stage": (("layer",), stage_of_row),
        },
        coords={
            "layer": names,
            "block": (("layer",), blocks),
            "cause": list(CAUSES),
            "phase": list(PHASES),
        },
        attrs=attrs,
    )


def _tops(total: Int, starts: Int) -> Int:
    """Index into `total` of each operation's highest point; operation i ends where i + 1 starts.

    An operation that makes and frees nothing has the level that it found.
    """
    ends = np.append(starts[1:], len(total) - 1)
    highest = np.maximum.reduceat(total, np.minimum(starts, len(total) - 1))
    highest = np.where(ends > starts, np.maximum(highest, total[ends]), total[starts])
    length = np.maximum(ends - starts, 0) + 1
    owner = np.repeat(np.arange(len(starts)), length)
    place = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length) + starts[owner]
    match = np.flatnonzero(total[place] == highest[owner])
    first = np.unique(owner[match], return_index=True)[1]
    tops: Int = place[match[first]]
    return tops
