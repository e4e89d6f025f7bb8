"""What fits in a budget of bytes: the largest tile, the largest batch, the deepest network.

Each answer is the true maximum of the model in `bigunet.memory.predict`: the next larger one is
over the budget by the same model. Memory grows with tile and batch, so these are found by closing
in on the limit from both sides.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from bigunet.errors import MemoryBudgetError, SpecError, fail
from bigunet.layers import Shape, layer_table
from bigunet.machines import Device
from bigunet.machines import device as device_of
from bigunet.memory.causes import format_of, optimiser_bytes, parameter_counts
from bigunet.memory.predict import peak_bytes
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import Tile, inner_tile

__all__ = ["Fit", "budget_bytes", "deepest", "largest_batch", "largest_tile", "static_bytes"]

# Beyond these no search goes: a tile of 2^20 pixels a side, a batch of 2^20 images.
_LARGEST = 1 << 20


class Fit(NamedTuple):
    """An answer: its size (pixels a side, images, or levels), the peak there, and one step on.

    `next_peak` is None where no larger one exists.
    """

    size: int
    peak: int
    next_size: int | None
    next_peak: int | None


def budget_bytes(budget: int | str | Device) -> int:
    """Bytes of a budget: a number, or a device by name or value.

    Raises
    ------
    SpecError : for an unknown device.
    MemoryBudgetError : for less than one byte.
    """
    if isinstance(budget, str | Device):
        return device_of(budget).memory_bytes
    if isinstance(budget, bool) or budget < 1:
        fail(
            MemoryBudgetError,
            rule="a budget is a number of bytes, at least 1, or a device's name",
            got=budget,
            remedy='Try 16 * 2**30 or "V100-16GB".',
        )
    return int(budget)


def _limit(budget: int | str | Device, how: dict[str, Any]) -> int:
    """The budget in bytes; a device as the budget is also the device that is predicted."""
    if isinstance(budget, str | Device):
        how.setdefault("device", budget)
    return budget_bytes(budget)


def static_bytes(spec: UNetSpec, train: TrainSpec) -> int:
    """Parameters, gradients and optimiser state: what no tile is small enough to avoid."""
    rows = layer_table(spec, (1, spec.in_channels, spec.stride, spec.stride))
    form = format_of(train)
    counts = [count for row in rows for count in parameter_counts(spec, row)]
    return 2 * sum(counts) * form.weight + optimiser_bytes(train, counts, form)


def largest_tile(
    spec: UNetSpec,
    train: TrainSpec,
    budget: int | str | Device,
    *,
    batch: int | None = None,
    halo: int | None = None,
    cropped: bool = True,
    **how: Any,
) -> Fit:
    """The largest square tile core, in pixels a side, that trains within `budget`.

    The tile has its whole halo around it, as one inside a large image has.

    Parameters
    ----------
    budget : bytes, or a device.
    batch : tiles in a step; `train.batch` by default.
    halo, cropped : as in `bigunet.tiles.tile_image`.
    how : stages, chunks and so on, as in `bigunet.memory.memory`.

    Raises
    ------
    MemoryBudgetError : where not even a tile of one stride fits.
    """
    number = train.batch if batch is None else batch

    def peak(step: int) -> int:
        tile = inner_tile(step * spec.stride, spec, halo=halo, cropped=cropped)
        shape = (number, spec.in_channels, *tile.read.shape)
        return max(peak_bytes(spec, shape, train, tile=tile, **how))

    def pixels(step: int) -> int:
        height, width = inner_tile(step * spec.stride, spec, halo=halo, cropped=False).read.shape
        return height * width

    limit = _limit(budget, how)
    found = _largest(peak, limit, _LARGEST // spec.stride, pixels)
    if found is None:
        _too_small(spec, train, limit, f"a tile of {spec.stride} x {spec.stride}", peak(1))
    return Fit(
        found.size * spec.stride,
        found.peak,
        None if found.next_size is None else found.next_size * spec.stride,
        found.next_peak,
    )


def largest_batch(
    spec: UNetSpec,
    shape_BCHW: Shape,
    train: TrainSpec,
    budget: int | str | Device,
    *,
    tile: Tile | None = None,
    **how: Any,
) -> Fit:
    """The largest batch of images (or tiles) of this shape; its own batch does not matter.

    Raises
    ------
    MemoryBudgetError : where not even one image fits.
    """

    def peak(number: int) -> int:
        return max(peak_bytes(spec, (number, *shape_BCHW[1:]), train, tile=tile, **how))

    limit = _limit(budget, how)
    found = _largest(peak, limit, _LARGEST)
    if found is None:
        _too_small(spec, train, limit, "a batch of one", peak(1))
    return found


def deepest(
    spec: UNetSpec,
    shape_BCHW: Shape,
    train: TrainSpec,
    budget: int | str | Device,
    **how: Any,
) -> Fit:
    """The most levels with which images of this shape train within `budget`.

    Images must be as large as the stride, 2^(levels - 1), so there may be no deeper network to
    ask for.

    Raises
    ------
    MemoryBudgetError : where not even one level fits.
    """
    sides = min(shape_BCHW[2:])

    def peak(levels: int) -> int:
        return max(peak_bytes(spec.replace(levels=levels), shape_BCHW, train, **how))

    limit = _limit(budget, how)
    # Not by halving: a deeper network of equal width needs little more, and padding may shrink.
    best: tuple[int, int] | None = None
    following: tuple[int, int] | None = None
    for levels in range(1, min(16, max(1, sides).bit_length()) + 1):
        try:
            bytes_ = peak(levels)
        except SpecError:
            # Group norm's groups may not divide a deeper level's width.
            break
        if bytes_ <= limit:
            best, following = (levels, bytes_), None
        elif following is None:
            following = (levels, bytes_)
    if best is None:
        _too_small(spec.replace(levels=1), train, limit, "one level", peak(1))
    return Fit(*best, *(following or (None, None)))


def _largest(
    peak: Callable[[int], int], limit: int, most: int, scale: Callable[[int], int] = int
) -> Fit | None:
    """The largest n from 1 to `most` with peak(n) <= limit, for a peak that grows with n.

    A peak is nearly linear in `scale(n)` (pixels, images), so the next n to try is read off a
    line; where that closes in on one side only, the interval is halved.
    """
    low = peak(1)
    if low > limit:
        return None
    good, good_peak = 1, low
    bad, bad_peak = min(2, most + 1), None
    if bad <= most:
        bad_peak = peak(bad)
        # A line through the last two, until one is over the limit.
        while bad_peak <= limit:
            before, before_peak = good, good_peak
            good, good_peak = bad, bad_peak
            if good == most:
                return Fit(good, good_peak, None, None)
            slope = (good_peak - before_peak) / (scale(good) - scale(before))
            room = (limit - good_peak) / slope if slope > 0 else float("inf")
            bad = good + 1
            while bad < most and scale(bad) - scale(good) <= room:
                bad = min(most, good + 2 * (bad - good))
            bad_peak = peak(bad)
    if bad_peak is None:
        return Fit(good, good_peak, None, None)
    halve = False
    while bad - good > 1:
        target = scale(good) + (scale(bad) - scale(good)) * (limit - good_peak) / max(
            1, bad_peak - good_peak
        )
        guess = (good + bad) // 2
        if not halve:
            guess = good + bisect_right(range(good + 1, bad), target, key=scale)
        guess = min(max(guess, good + 1), bad - 1)
        width = bad - good
        for probe in (guess, guess + 1):
            if not good < probe < bad:
                continue
            value = peak(probe)
            if value > limit:
                bad, bad_peak = probe, value
                break
            good, good_peak = probe, value
        halve = 2 * (bad - good) > width
    return Fit(good, good_peak, bad, bad_peak)


def _too_small(spec: UNetSpec, train: TrainSpec, limit: int, what: str, needed: int) -> NoReturn:
    static = static_bytes(spec, train)
    if static > limit:
        rule = f"parameters, gradients and optimiser state take {static:,} bytes"
        remedy = "Use fewer levels or channels, SGD, bf16, or stages on several devices."
    else:
        rule = f"{what} takes {needed:,} bytes"
        remedy = "Raise the budget, or recompute, use bf16 or a smaller network."
    fail(MemoryBudgetError, rule=rule, got=f"a budget of {limit:,}", remedy=remedy)
