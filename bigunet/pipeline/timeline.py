"""The timeline of a real step: when each rank began and ended each pass of each micro-batch.

    launch(measured_timeline, (plan.to_yaml(),), ranks=plan.num_ranks)

It has the variables of `bigunet.simulate.simulate`, so that the two can be laid over each other.
"""

from __future__ import annotations

import time
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr

from bigunet.calibrate import freeze_norm
from bigunet.losses import Objective
from bigunet.model import UNet
from bigunet.pipeline.distributed import Distributed
from bigunet.pipeline.step import Pipeline
from bigunet.plan import Plan
from bigunet.spec import TrainSpec

__all__ = ["measured_timeline"]


class _Event(NamedTuple):
    device: int
    stage: int
    micro_batch: int
    kind: str
    start: float
    end: float


def measured_timeline(plan: Plan | str, *, rounds: int = 5) -> xr.Dataset:
    """One step of random images on the engine `distributed`: that of median length of `rounds`.

    Called on every rank of the plan (or YAML text of one), all on one machine, whose clock they
    share. One step before the rounds warms up.

    Returns
    -------
    Along `action` (sorted by start): `device`, `stage`, `micro_batch`, `kind` ("forward" or
    "backward", which includes recomputation), `start` and `end` in seconds; `busy` (of_device).
    Attributes `step_seconds` and `bubble`. Of the first pipeline, where there are several.

    Raises
    ------
    PlanError, LaunchError : see `Pipeline`.
    """
    if isinstance(plan, str):
        plan = Plan.from_yaml(plan)
    plan = _plain_loss(plan)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = UNet(plan.spec).train()
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = torch.randn(plan.shape_BCHW)
        batch, _, *size = plan.shape_BCHW
        labels = torch.randint(0, plan.spec.classes, (batch, *size))
    freeze_norm(model)
    pipeline = Pipeline(plan, model, Objective(plan.spec.classes), engine="distributed")
    engine: Any = pipeline.engine
    assert isinstance(engine, Distributed)
    steps: list[tuple[float, list[_Event]]] = []
    for number in range(rounds + 1):
        engine.places.all.wait()
        engine.events.clear()
        began = time.perf_counter()
        pipeline.step_images(x, labels)
        ended = time.perf_counter()
        mine = (began, ended, list(engine.events) if engine.places.index == 0 else [])
        everyone: list[Any] = [None] * engine.places.all.size
        dist.all_gather_object(everyone, mine)
        first = min(start for start, _, _ in everyone)
        events = [
            _Event(device, stage, mb, kind, a - first, b - first)
            for rank, (_, _, found) in enumerate(everyone)
            for stage, mb, kind, a, b in found
            for device in [plan.position(rank)[1]]
        ]
        if number:
            steps.append((max(end for _, end, _ in everyone) - first, events))
    seconds = median_low([length for length, _ in steps])
    events = sorted(next(e for length, e in steps if length == seconds), key=lambda e: e.start)
    return _dataset(plan, seconds, events)


def _plain_loss(plan: Plan) -> Plan:
    """The plan with settings that the timing does not depend on at their simplest."""
    values = plan.to_dict()
    kept = TrainSpec(recompute=plan.train.recompute, precision=plan.train.precision)
    return Plan.from_dict({**values, "train": kept.to_dict()})


def _dataset(plan: Plan, seconds: float, events: list[_Event]) -> xr.Dataset:
    busy = np.zeros(plan.num_devices)
    for event in events:
        busy[event.device] += event.end - event.start
    units = {"units": "s"}
    return xr.Dataset(
        {
            "device": ("action", [e.device for e in events]),
            "stage": ("action", [e.stage for e in events]),
            "micro_batch": ("action", [e.micro_batch for e in events]),
            "kind": ("action", np.array([e.kind for e in events], dtype="U9")),
            "start": ("action", [e.start for e in events], units),
            "end": ("action", [e.end for e in events], units),
            "busy": ("of_device", busy, units),
        },
        attrs={
            "step_seconds": seconds,
            "bubble": 1 - float(busy.sum()) / (plan.num_devices * seconds),
            "machine": "measured here",
        },
    )
