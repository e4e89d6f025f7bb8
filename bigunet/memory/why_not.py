"""Why a step does not fit, what each remedy would save, and what it would cost in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bigunet.errors import BigUNetError
from bigunet.layers import LayerRow, Shape, layer_table
from bigunet.machines import PROCESSORS, Device
from bigunet.machines import device as device_of
from bigunet.memory.causes import CAUSES
from bigunet.memory.predict import memory, peak_bytes
from bigunet.memory.segments import segments
from bigunet.memory.solve import budget_bytes, largest_tile
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import Tile, inner_tile

__all__ = ["Cause", "Diagnosis", "Remedy", "step_flops", "why_not"]

_Add = Callable[[str, str, int, float], None]


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause's bytes at the peak, and its share of them."""

    name: str
    nbytes: int
    share: float


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change, the bytes it saves at the peak, and the time it costs as a factor (1: none).

    The time is that of a step's floating-point operations; bf16, which halves the bytes and is
    faster where the device has units for it (`change` says where it has none), is given as 1, and
    so are stages without their idle time.
    """

    name: str
    change: str
    peak: int
    saved: int
    time_factor: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Peak against budget; causes by size; remedies: those that fit first, by time, then size."""

    peak: int
    budget: int
    fits: bool
    phase: str
    layer: str
    causes: tuple[Cause, ...]
    remedies: tuple[Remedy, ...]


def why_not(
    spec: UNetSpec,
    shape_BCHW: Shape,
    train: TrainSpec,
    budget: int | str | Device,
    *,
    tile: Tile | None = None,
    device: str | Device | None = None,
) -> Diagnosis:
    """What takes the memory at the peak of a step, and the remedies ranked.

    Raises
    ------
    MemoryBudgetError, SpecError, ShapeError : for a budget, device or shape that cannot be.
    """
    limit = budget_bytes(budget)
    if device is None and isinstance(budget, str | Device):
        device = budget
    table = memory(spec, shape_BCHW, train, tile=tile, device=device)
    peak = int(table.peak[0])
    moment = int(table.peak_moment[0])
    at_peak = table.at_peak.values[0]
    causes = sorted(
        (
            Cause(name, int(size), int(size) / peak)
            for name, size in zip(CAUSES, at_peak, strict=True)
            if size
        ),
        key=lambda cause: -cause.nbytes,
    )
    held = table.held.values.sum(axis=1)
    remedies = _remedies(spec, shape_BCHW, train, limit, tile, device, peak, held)
    ranked = sorted(remedies, key=lambda r: (not r.fits, r.time_factor if r.fits else r.peak))
    return Diagnosis(
        peak=peak,
        budget=limit,
        fits=peak <= limit,
        phase=str(table.phase.values[int(table.moment_phase[moment])]),
        layer=str(table.layer.values[int(table.moment_layer[moment])]),
        causes=tuple(causes),
        remedies=tuple(ranked),
    )


def step_flops(rows: Sequence[LayerRow], train: TrainSpec) -> int:
    """Operations of one step: forward, twice that backward, and what is recomputed.

    A convolution's backward is two convolutions as large as the forward one.
    """
    forward = sum(row.flops for row in rows)
    recomputed = forward if train.recompute in ("block", "stage") else 0
    return 3 * forward + recomputed


def _remedies(
    spec: UNetSpec,
    shape: Shape,
    train: TrainSpec,
    limit: int,
    tile: Tile | None,
    device: str | Device | None,
    peak: int,
    held: NDArray[np.int64],
) -> list[Remedy]:
    rows = layer_table(spec, shape, tile=tile)
    before = step_flops(rows, train)
    found: list[Remedy] = []

    def add(name: str, change: str, after: int, time: float) -> None:
        if after < peak:
            found.append(Remedy(name, change, after, peak - after, time, after <= limit))

    def retrain(**changes: object) -> tuple[int, float]:
        other = train.replace(**changes)
        after = peak_bytes(spec, shape, other, tile=tile, device=device)[0]
        return after, step_flops(rows, other) / before

    if train.recompute == "none":
        add("recompute", "each block again in the backward pass", *retrain(recompute="block"))
    if train.precision == "fp32":
        note = _no_bf16(device)
        add("bf16 autocast", f"activations in bf16{note}", *retrain(precision="bf16-autocast"))
        add("bf16", f"weights and activations in bf16{note}", *retrain(precision="bf16"))
    if train.optimiser != "sgd":
        add("SGD", "no optimiser state", *retrain(optimiser="sgd"))
    if shape[0] > 1:
        one = (1, *shape[1:])
        after = peak_bytes(spec, one, train, tile=tile, device=device)[0]
        add("batch of 1", f"{shape[0]} steps, gradients added up", after, 1.0)
    _add_tiles(spec, shape, train, limit, tile, device, add)
    _add_stages(spec, shape, train, tile, device, rows, held, add)
    return found


def _no_bf16(device: str | Device | None) -> str:
    """What to say of bf16 on a device that has no units for it."""
    known = None if device is None else PROCESSORS.get(device_of(device).name)
    if known is None or "bf16" in known.flops_per_second:
        return ""
    return f"; {known.name} has no units for bf16, so no faster"


def _add_tiles(
    spec: UNetSpec,
    shape: Shape,
    train: TrainSpec,
    limit: int,
    tile: Tile | None,
    device: str | Device | None,
    add: _Add,
) -> None:
    """A smaller tile (the largest that fits, one image at a time), and the cropped decoder."""
    core = shape[2:] if tile is None else tile.core.shape
    area = core[0] * core[1]
    before = sum(row.flops for row in layer_table(spec, shape, tile=tile)) / (shape[0] * area)

    def cost(other: Tile) -> float:
        """Operations an answered pixel, against those now."""
        flops = sum(
            row.flops
            for row in layer_table(spec, (1, spec.in_channels, *other.read.shape), tile=other)
        )
        return flops / other.core.area / before

    if spec.tile_exact:
        try:
            side = largest_tile(spec, train, limit, batch=shape[0], device=device).size
        except BigUNetError:
            side = spec.stride
        if side < max(core):
            smaller = inner_tile(side, spec)
            batch = (shape[0], spec.in_channels, *smaller.read.shape)
            after = peak_bytes(spec, batch, train, tile=smaller, device=device)[0]
            add("smaller tile", f"{side} x {side} with its halo", after, cost(smaller))
    if tile is not None and all(
        crop.skip.shape == (tile.read.shape[0] >> level, tile.read.shape[1] >> level)
        for level, crop in enumerate(tile.crops)
    ):
        cropped = inner_tile(core, spec)
        if cropped.read.shape == tile.read.shape:
            batch = (shape[0], spec.in_channels, *cropped.read.shape)
            after = peak_bytes(spec, batch, train, tile=cropped, device=device)[0]
            add("cropped decoder", "drop what no output pixel needs", after, cost(cropped))


def _add_stages(
    spec: UNetSpec,
    shape: Shape,
    train: TrainSpec,
    tile: Tile | None,
    device: str | Device | None,
    rows: Sequence[LayerRow],
    held: NDArray[np.int64],
    add: _Add,
) -> None:
    """Two devices, cut between blocks so that the larger stage is smallest.

    `held`: bytes by layer, shape (layer,).
    """
    blocks = [len(part.rows) for part in segments(rows, "block")]
    if len(blocks) < 2:
        return
    sums = np.cumsum(blocks)
    total = int(sums[-1])

    def peaks(k: int) -> tuple[int, ...]:
        cut = int(sums[k])
        return peak_bytes(spec, shape, train, tile=tile, stages=(cut, total - cut), device=device)

    # The first stage's peak grows with the cut, the second's falls: from where the layers' bytes
    # are halved, on to where the two meet.
    halves = np.cumsum(held)[sums - 1]
    k = min(int(np.searchsorted(halves, halves[-1] / 2)), len(blocks) - 2)
    best = (max(found := peaks(k)), k)
    step = 1 if found[0] < found[1] else -1
    while 0 <= k + step < len(blocks) - 1:
        k += step
        found = peaks(k)
        best = min(best, (max(found), k))
        if (found[0] < found[1]) != (step > 0):
            break
    first = int(sums[best[1]])
    change = f"on two devices, {first} and {total - first} layers"
    add("two stages", change, best[0], 1.0)
