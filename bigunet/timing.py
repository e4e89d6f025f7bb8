"""This machine's own seconds of each layer, for `bigunet.cost.MeasuredCost`.

Layers are timed where they stand: the whole network runs forward and back, layer by layer, so
each finds its input in the caches as a real step leaves it and gets the gradient in the layout
that the layer above hands down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bigunet.calibrate import freeze_norm
from bigunet.cost import MeasuredCost
from bigunet.errors import SpecError, fail
from bigunet.layers import LayerRow, layer_table
from bigunet.model import UNet
from bigunet.sample_parallel import narrowed
from bigunet.spec import Precision, UNetSpec
from bigunet.tiles import Tile

__all__ = ["time_layers", "time_tiles"]


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
    shapes = [(b, spec.in_channels, *size) for b in rising]
    return _timed(spec, [(s, None) for s in shapes], rising, precision, rounds, in_flight, threads,
                  device)  # fmt: skip


def time_tiles(
    spec: UNetSpec,
    tiles: Sequence[Tile],
    *,
    precision: Precision = "fp32",
    rounds: int = 5,
    threads: int | None = None,
    device: str | torch.device = "cpu",
) -> MeasuredCost:
    """Seconds of every layer for tiles one at a time, by the pixels of the layer's map.

    One tile of each size is timed, its decoder cropped as the tile says; see `time_layers` for
    the rest. What the tile's pass takes in one piece, forward and back, is timed in turn and
    shared out over the layers in proportion: timed apart they miss a few percent of it. The cost
    that comes of it takes the rows of any tile.

    Raises
    ------
    SpecError : no tiles, or no rounds.
    """
    if rounds < 1 or not tiles:
        fail(
            SpecError,
            rule="at least one tile is timed at least once",
            got=f"{len(tiles)} tiles, {rounds} rounds",
            remedy="Pass tile_image(...), say.",
        )
    kinds: dict[tuple[object, ...], Tile] = {}
    for tile in tiles:
        crops = tuple((c.below.shape, c.upsampled.shape) for c in tile.crops)
        kinds.setdefault((tile.read.shape, crops, tile.write.shape), tile)
    chosen = list(kinds.values())
    cases = [((1, spec.in_channels, *tile.read.shape), tile) for tile in chosen]
    numbers = tuple(range(1, len(cases) + 1))
    plain = _timed(spec, cases, numbers, precision, rounds, 1, threads, device)
    tables = [layer_table(spec, shape, tile=tile) for shape, tile in cases]
    forward, backward, pixels = {}, {}, {}
    for i, row in enumerate(tables[0]):
        sizes = [t[i].out_shape[2] * t[i].out_shape[3] for t in tables]
        order = sorted(range(len(sizes)), key=sizes.__getitem__)
        pixels[row.name] = tuple(sizes[k] for k in order)
        forward[row.name] = tuple(plain.forward_seconds[row.name][k] for k in order)
        backward[row.name] = tuple(plain.backward_seconds[row.name][k] for k in order)
    return MeasuredCost(numbers, forward, backward, plain.source, pixels)


_Case = tuple[tuple[int, int, int, int], Tile | None]


def _timed(
    spec: UNetSpec,
    cases: Sequence[_Case],
    numbers: tuple[int, ...],
    precision: Precision,
    rounds: int,
    in_flight: int,
    threads: int | None,
    device: str | torch.device,
) -> MeasuredCost:
    with torch.random.fork_rng(devices=[]), _threads(threads):
        torch.manual_seed(0)
        model = UNet(spec).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        if precision == "bf16":
            model = narrowed(model)
        model.train()
        freeze_norm(model)
        timed = [_timed_steps(model, *case, precision, rounds, in_flight) for case in cases]
    names = [row.name for row in model.rows]
    return MeasuredCost(
        numbers,
        {n: tuple(float(f[i]) for f, _ in timed) for i, n in enumerate(names)},
        {n: tuple(float(b[i]) for _, b in timed) for i, n in enumerate(names)},
        source=f"timed on {torch.device(device).type}, {threads or torch.get_num_threads()} "
        f"threads, {precision}",
    )


def _timed_steps(
    model: UNet,
    shape: tuple[int, int, int, int],
    tile: Tile | None,
    precision: Precision,
    rounds: int,
    in_flight: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Median (forward, backward) seconds of each row."""
    weight = next(model.parameters())
    x = torch.randn(shape, device=weight.device).to(weight.dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    side = shape[2:] if tile is None else tile.write.shape
    labels = torch.zeros((shape[0], *side), dtype=torch.int64, device=weight.device)
    steps, wholes = [], []
    for _ in range(rounds + 1):
        steps.append(_timed_step(model, x, labels, tile, precision, in_flight))
        if tile is not None:
            wholes.append(_timed_whole(model, x, labels, tile, precision))
    forward, backward = (np.median([step[i] for step in steps[1:]], axis=0) for i in (0, 1))
    if tile is not None:
        share = np.median(wholes[1:]) / (forward.sum() + backward.sum())
        forward, backward = share * forward, share * backward
    return forward, backward


def _timed_whole(model: UNet, x: Tensor, labels: Tensor, tile: Tile, precision: Precision) -> float:
    """Seconds of the pass that a training step makes of a tile, in one piece."""
    clock = _clock(x.device)
    began = clock()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16-autocast"):
        out = model.forward_tile(x, tile)
    F.cross_entropy(out.float(), labels).backward()
    return clock() - began


_Kept = list[tuple[LayerRow, tuple[Tensor, ...], tuple[nn.Parameter, ...], Tensor]]


def _timed_step(
    model: UNet,
    x: Tensor,
    labels: Tensor,
    tile: Tile | None,
    precision: Precision,
    in_flight: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each row's forward and backward pass, means over the micro-batches."""
    if in_flight > 1:
        model.zero_grad()  # the first gradient is kept, the others are added, as in a step
    passes = [_forward(model, x, labels, tile, precision) for _ in range(in_flight)]
    forward = np.mean([seconds for seconds, _ in passes], axis=0)
    held = [kept for _, kept in passes]
    del passes
    backward = np.mean([_backward(held.pop(0), _clock(x.device)) for _ in range(in_flight)], axis=0)
    return forward, backward


def _forward(
    model: UNet, x: Tensor, labels: Tensor, tile: Tile | None, precision: Precision
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
            x = _apply(row, model.layers[row.name], inputs, tile)
        loss = None
        if row.kind == "head":
            seen = x if tile is None else x[(..., *tile.out.slices)]
            loss = F.cross_entropy(seen.float(), labels)
        forward.append(clock() - began)
        if row.kind == "skip":
            skips[row.name] = x
        weights = tuple(model.layers[row.name].parameters())
        kept.append((row, inputs, weights, x if loss is None else loss))
    return forward, kept


def _backward(kept: _Kept, clock: Callable[[], float]) -> list[float]:
    backward: list[float] = []
    gradient: Tensor | None = None
    from_skips: dict[str, Tensor] = {}
    while kept:
        row, inputs, weights, out = kept.pop()
        began = clock()
        if row.kind == "skip":
            assert gradient is not None
            gradient = gradient + from_skips.pop(row.name)
        else:
            # Not `backward`: leaves keep gradients in a layout of their own, where in a step the
            # layer below gets a strided view out of a concatenation, say, as it is.
            wanted = [t for t in inputs if t.requires_grad]
            found = torch.autograd.grad(out, (*wanted, *weights), gradient)
            for weight, more in zip(weights, found[len(wanted) :], strict=True):
                weight.grad = more if weight.grad is None else weight.grad.add_(more)
            gradient = found[0] if wanted else None
        backward.append(clock() - began)
        if row.source is not None:
            from_skips[row.source] = found[1]
    return backward[::-1]


def _apply(
    row: LayerRow, module: nn.Module, inputs: tuple[Tensor, ...], tile: Tile | None
) -> Tensor:
    match row.kind:
        case "skip":
            return inputs[0]
        case "up" if tile is not None:
            crop = tile.crops[row.level]
            up: Tensor = module(inputs[0][(..., *crop.below.slices)])
            return up[(..., *crop.upsampled.slices)]
        case "concat":
            skip = inputs[1]
            if tile is not None:
                skip = skip[(..., *tile.crops[row.level].skip.slices)]
            return torch.cat((skip, inputs[0]), dim=1)
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
