"""Observed bytes of a training step, in one table with those predicted and traced.

On a CUDA device the peak is what the caching allocator reports; on a CPU it is the sum over the
allocator's own events, as torch's profiler records them, so it counts kernels' work space too.
What small steps take there is not all predicted: below about 3 MB a step may need up to half a
megabyte more than the prediction says (64 random networks of the tests' kind).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import xarray as xr

from bigunet.errors import SpecError, fail
from bigunet.layers import Shape
from bigunet.memory import memory
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import Tile
from bigunet.tracing import StepRunner, trace_peak

__all__ = ["compare_memory", "measured_peak"]


def measured_peak(
    spec: UNetSpec,
    shape_BCHW: Shape,
    train: TrainSpec,
    *,
    tile: Tile | None = None,
    stages: Sequence[int] | None = None,
    device: str = "cpu",
) -> int:
    """Highest bytes in use during the second of two real steps; arguments as `memory` has them.

    Raises
    ------
    SpecError : for "cuda" where there is none.
    """
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        fail(
            SpecError,
            rule="a step is measured on cpu, or on cuda where there is one",
            got=repr(device),
            remedy="Use cpu.",
        )
    runner = StepRunner(
        spec, shape_BCHW, train, tile=tile, stages=stages, device=device, foreach=device == "cuda"
    )
    runner.step()
    if device == "cuda":
        runner.optimiser.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        runner.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    runner.optimiser.zero_grad(set_to_none=True)
    return _resident(runner) + _rise(runner)


def _resident(runner: StepRunner) -> int:
    """Bytes that are there before the step: parameters, buffers, optimiser, image and labels."""
    tensors = [*runner.model.parameters(), *runner.model.buffers(), runner.x, runner.y]
    for state in runner.optimiser.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _rise(runner: StepRunner) -> int:
    """How far the CPU allocator's events rise above the start of one step."""
    # The profiler's library says on stderr that it starts and stops, unless told not to.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        runner.step()
    inner = profiler.profiler
    assert inner is not None
    events = [e for e in inner.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    level = highest = 0
    for event in events:
        level += event.nbytes()
        highest = max(highest, level)
    return highest


def compare_memory(
    spec: UNetSpec,
    shape_BCHW: Shape,
    train: TrainSpec,
    *,
    tile: Tile | None = None,
    stages: Sequence[int] | None = None,
    device: str = "cpu",
    measure: bool = True,
) -> xr.Dataset:
    """Peak bytes observed, traced under fake tensors and measured, and those predicted for each.

    A measured CPU step is compared with a prediction that counts the convolutions' work space, a
    traced one and a CUDA step with the tensors alone (what cuDNN takes is not known beforehand).
    `measure=False` leaves out the real step, for sizes that this machine cannot hold. Arguments
    and errors as `memory` and `measured_peak` have them.

    Returns
    -------
    Dataset over `source` ("traced", "measured"): `predicted` and `observed` in bytes, `ratio`.
    """
    cuda = device == "cuda"

    def predicted(workspace: bool) -> int:
        table = memory(
            spec,
            shape_BCHW,
            train,
            tile=tile,
            stages=stages,
            together=stages is not None,
            device="H200" if cuda else None,
            workspace=workspace,
        )
        return int(table.peak[0])

    traced = trace_peak(spec, shape_BCHW, train, tile=tile, stages=stages, cuda=cuda)
    expected, observed = [predicted(False)], [traced["total"]]
    if measure:
        expected.append(predicted(workspace=not cuda))
        observed.append(
            measured_peak(spec, shape_BCHW, train, tile=tile, stages=stages, device=device)
        )
    ratio = [e / o for e, o in zip(expected, observed, strict=True)]
    return xr.Dataset(
        {
            "predicted": ("source", expected, {"units": "bytes"}),
            "observed": ("source", observed, {"units": "bytes"}),
            "ratio": ("source", ratio, {"units": "1"}),
        },
        coords={"source": ["traced", "measured"][: len(observed)]},
        attrs={"device": device, "precision": train.precision, "shape": tuple(shape_BCHW)},
    )
