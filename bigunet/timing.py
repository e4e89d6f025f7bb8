"""This machine's own seconds: of each layer, of a message between ranks, of plain arithmetic.

Layers are timed where they stand: the whole network runs forward and back, layer by layer, so
each finds its input in the caches as a real step leaves it and gets the gradient in the layout
that the layer above hands down. What is timed feeds `bigunet.cost.MeasuredCost` and
`bigunet.machines.Machine`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from bigunet.calibrate import freeze_norm
from bigunet.cost import MeasuredCost
from bigunet.errors import SpecError, fail
from bigunet.launch import launch
from bigunet.layers import LayerRow
from bigunet.machines import Link, Machine, Processor
from bigunet.machines import device as device_of
from bigunet.model import UNet
from bigunet.ranks import current
from bigunet.sample_parallel import narrowed
from bigunet.spec import Precision, UNetSpec

__all__ = ["this_machine", "time_layers", "time_link"]


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Layers -----------------------------------------------------------------------------------------


def time_layers(
    spec: UNetSpec,
    size: tuple[int, int],
    *,
    batches: Sequence[int] = (1,),
    precision: Precision = "fp32",
    rounds: int = 5,
    in_flight: int = 1,
    threads: int | None = None,
    device: str | torch.device = "cpu",
) -> MeasuredCost:
    """Seconds of every layer, forward and backward, for micro-batches of `batches` images.

    Medians over `rounds` steps after one that warms up, in channels-last layout, as training has
    it. The last layer's seconds contain the loss, which its stage computes.

    Parameters
    ----------
    size : (height, width) in pixels, multiples of the stride.
    in_flight : micro-batches that are held between their forward and backward passes, as a
        pipeline holds them; memory that is new in each step costs time.
    threads : CPU threads, those of one rank; torch's present number by default.

    To time layers with the neighbours at work, as they are in a pipeline, start this function on
    as many ranks: `launch(time_layers, (spec, size), {"threads": 1}, ranks=2)`.

    Raises
    ------
    SpecError : for a size off the stride, or no rounds.
    """
    if rounds < 1 or in_flight < 1 or not batches or any(side % spec.stride for side in size):
        fail(
            SpecError,
            rule=f"layers are timed on sides that are multiples of {spec.stride}, at least once",
            got=f"{size}, batches {tuple(batches)}, {rounds} rounds",
            remedy="Change them.",
        )
    rising = tuple(sorted(set(batches)))
    with torch.random.fork_rng(devices=[]), _threads(threads):
        torch.manual_seed(0)
        model = UNet(spec).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        if precision == "bf16":
            model = narrowed(model)
        model.train()
        freeze_norm(model)
        by_batch = [_timed_steps(model, (b, spec.in_channels, *size), precision, rounds, in_flight)
                    for b in rising]  # fmt: skip
    names = [row.name for row in model.rows]
    return MeasuredCost(
        rising,
        {n: tuple(float(f[i]) for f, _ in by_batch) for i, n in enumerate(names)},
        {n: tuple(float(b[i]) for _, b in by_batch) for i, n in enumerate(names)},
        source=f"timed on {torch.device(device).type}, {threads or torch.get_num_threads()} "
        f"threads, {precision}",
    )


def _timed_steps(
    model: UNet, shape: tuple[int, int, int, int], precision: Precision, rounds: int, in_flight: int
) -> tuple[np.ndarray, np.ndarray]:
    """Median (forward, backward) seconds of each row."""
    weight = next(model.parameters())
    x = torch.randn(shape, device=weight.device).to(weight.dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    labels = torch.zeros((shape[0], *shape[2:]), dtype=torch.int64, device=weight.device)
    steps = [_timed_step(model, x, labels, precision, in_flight) for _ in range(rounds + 1)][1:]
    forward, backward = (np.median([step[i] for step in steps], axis=0) for i in (0, 1))
    return forward, backward


_Kept = list[tuple[LayerRow, tuple[Tensor, ...], Tensor]]


def _timed_step(
    model: UNet, x: Tensor, labels: Tensor, precision: Precision, in_flight: int
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each row's forward and backward pass, means over the micro-batches."""
    if in_flight > 1:
        model.zero_grad()  # the first gradient is kept, the others are added, as in a step
    passes = [_forward(model, x, labels, precision) for _ in range(in_flight)]
    forward = np.mean([seconds for seconds, _ in passes], axis=0)
    held = [kept for _, kept in passes]
    del passes
    backward = np.mean([_backward(held.pop(0), _clock(x.device)) for _ in range(in_flight)], axis=0)
    return forward, backward


def _forward(
    model: UNet, x: Tensor, labels: Tensor, precision: Precision
) -> tuple[list[float], _Kept]:
    clock = _clock(x.device)
    kept: _Kept = []
    forward = []
    skips: dict[str, Tensor] = {}
    for row in model.rows:
        # Each layer starts a graph of its own. An activation in place overwrites what its
        # convolution put out, as it does in the network, not a leaf of the graph.
        skip = () if row.source is None else (skips[row.source].detach().requires_grad_(),)
        inputs = (x.detach().requires_grad_(row is not model.rows[0]), *skip)
        began = clock()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16-autocast"):
            x = _apply(row, model.layers[row.name], inputs)
        loss = F.cross_entropy(x.float(), labels) if row.kind == "head" else None
        forward.append(clock() - began)
        if row.kind == "skip":
            skips[row.name] = x
        kept.append((row, inputs, x if loss is None else loss))
    return forward, kept


def _backward(kept: _Kept, clock: Callable[[], float]) -> list[float]:
    backward: list[float] = []
    gradient: Tensor | None = None
    from_skips: dict[str, Tensor] = {}
    while kept:
        row, inputs, out = kept.pop()
        began = clock()
        if row.kind == "skip":
            assert gradient is not None
            gradient = gradient + from_skips.pop(row.name)
        else:
            out.backward(gradient)
            gradient = inputs[0].grad
        backward.append(clock() - began)
        if row.source is not None:
            assert inputs[1].grad is not None
            from_skips[row.source] = inputs[1].grad
    return backward[::-1]


def _apply(row: LayerRow, module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    match row.kind:
        case "skip":
            return inputs[0]
        case "concat":
            return torch.cat((inputs[1], inputs[0]), dim=1)
        case "activation" if getattr(module, "inplace", False):
            # A view of a leaf may not be overwritten; a shallow alias that is no leaf may.
            alias: Any = _Alias.apply(inputs[0])  # type: ignore[no-untyped-call]
            result: Tensor = module(alias)
            return result
        case _:
            result = module(inputs[0])
            return result


class _Alias(torch.autograd.Function):
    """The same memory as a new tensor that is no view, so that it may be overwritten."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _clock(device: torch.device) -> Callable[[], float]:
    if device.type != "cuda":
        return time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised


# Messages ---------------------------------------------------------------------------------------


def time_link(
    *, sizes_bytes: Sequence[int] = (2**12, 2**18, 2**22, 2**24), rounds: int = 10
) -> Link:
    """The link between two ranks of this machine, started for it, with one thread each.

    Latency and rate of the line through the medians of one-way times (half a round trip).
    """
    sizes = tuple(sizes_bytes)
    seconds = launch(_ping_pong, (sizes, rounds), ranks=2, threads_per_rank=1, progress=False)
    # Weighted by 1 / seconds: small messages tell the latency, and must not drown in large ones.
    weights = 1.0 / np.asarray(seconds)
    slope, latency = np.polyfit(np.asarray(sizes, float), seconds, 1, w=weights)
    largest = sizes[-1] / seconds[-1]
    rate = 1.0 / slope if slope > 0 else largest
    return Link("between ranks here", float(rate), float(max(latency, 0.0)), "timed by bigunet")


def _ping_pong(sizes: Sequence[int], rounds: int) -> list[float]:
    ranks = current()
    result = []
    for size in sizes:
        message = torch.zeros(size, dtype=torch.uint8, device=ranks.device)
        times = []
        for _ in range(rounds + 1):
            ranks.wait()
            began = time.perf_counter()
            for source in (0, 1):
                if ranks.rank == source:
                    dist.send(message, 1 - source)
                else:
                    dist.recv(message, source)
            times.append((time.perf_counter() - began) / 2)
        result.append(median(times[1:]))
    return result


# Arithmetic -------------------------------------------------------------------------------------


def this_machine(num_devices: int = 2, *, threads: int = 1, link: Link | None = None) -> Machine:
    """This machine as `num_devices` ranks of `threads` CPU threads, rates and link timed here.

    Rates are those of a large matrix product and of a copy; a launch is what a tiny operation
    costs. `link` saves timing it again.
    """
    with _threads(threads):
        flops = {}
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            a = torch.randn(1024, 1024).to(dtype)
            flops[name] = 2 * 1024**3 / _median_seconds(partial(torch.matmul, a, a))
        x = torch.zeros(2**24)
        y = torch.zeros(2**24)
        copied = 2 * x.nbytes / _median_seconds(lambda: y.copy_(x))
        one = torch.zeros(1)
        launch_seconds = _median_seconds(lambda: one + one, 200)
    processor = Processor(
        f"here, {threads} threads",
        flops,
        copied,
        max(1, device_of("here").memory_bytes // num_devices),
        launch_seconds,
        "timed by bigunet",
    )
    between = time_link() if link is None else link
    return Machine("here", processor, num_devices, between, between, between,
                   per_socket=num_devices)  # fmt: skip


def _median_seconds(work: Callable[[], object], rounds: int = 7) -> float:
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times[1:])
