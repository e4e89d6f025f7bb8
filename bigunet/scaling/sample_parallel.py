"""Sample-parallel training: tiles over ranks, as `bigunet.sample_parallel.step` runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

from bigunet.geometry import padded_size
from bigunet.machines import Device
from bigunet.memory import peak_bytes
from bigunet.scaling.axis import TileKinds, skeleton, tile_kinds
from bigunet.scaling.collective import members_of
from bigunet.scaling.deal import Shares, deal_kinds
from bigunet.scaling.messages import ddp_buckets, gradient_buckets, small_messages
from bigunet.scaling.setting import Outcome, Setting, misfit, sum_of, terms_of, unfit
from bigunet.scaling.work import Passes, Timed, passes, rank_seconds
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import Tile, tile_image

__all__ = [
    "hidden_sum",
    "kinds_of",
    "largest_kind",
    "reading",
    "sample_parallel",
    "shares_of",
    "tile_peak",
    "timed",
]

Floats = NDArray[np.float64]

_LABEL_BYTES = 1


def kinds_of(setting: Setting, tile: int) -> TileKinds:
    """The kinds of tiles of one image; kinds that are alike are one, as long as the batch is 1."""
    key = ("kinds", setting.shape, tile)
    if key not in setting.memo:
        setting.memo[key] = tile_kinds(
            setting.spec, setting.shape, tile, halo=setting.train.halo, cropped=setting.cropped,
            stackable=setting.train.batch > 1,
        )  # fmt: skip
    return cast(TileKinds, setting.memo[key])


def timed(setting: Setting, tile: int) -> Timed:
    """Forward and backward seconds of a batch of tiles of each of `kinds_of`; kept."""

    def seconds(batch: int, bare: bool) -> tuple[Floats, Floats]:
        key = ("timed", setting.shape, tile, batch, bare)
        if key not in setting.memo:
            kinds = kinds_of(setting, tile)
            each = passes(setting.spec, setting.cost, kinds, batch, bare=bare)
            setting.memo[key] = each.forward.sum(axis=0), each.backward.sum(axis=0)
        return cast("tuple[Floats, Floats]", setting.memo[key])

    return seconds


def shares_of(setting: Setting, kinds: TileKinds, gpus: int) -> Shares:
    """Each rank's tiles in one step."""
    images = setting.num_images(gpus)
    return deal_kinds(
        kinds.read_pixels.tolist(),
        (kinds.count * images).tolist(),
        gpus,
        lambda: np.tile(kinds.grid.ravel(), images).tolist(),
    )


def largest_kind(
    spec: UNetSpec, shape: tuple[int, int], core: int, halo: int | None, cropped: bool
) -> Tile:
    """The tile with most pixels to read, its boxes counted from the corner of what it reads."""
    return _largest(skeleton(spec), shape, core, spec.halo if halo is None else halo, cropped)


@lru_cache(maxsize=4096)
def _largest(bare: UNetSpec, shape: tuple[int, int], core: int, reach: int, cropped: bool) -> Tile:
    stride = bare.stride
    # Long images have the tiles of shorter ones.
    near = -(-padded_size(reach, stride) // core) + 1
    short = [size - core * max(0, -(-size // core) - 2 * near - 1) for size in shape]
    tiles = tile_image((short[0], short[1]), core, bare, halo=reach, cropped=cropped)
    found = max(tiles, key=lambda t: (t.read.area, sum(c.skip.area for c in t.crops)))
    read, core_box, write = (b.within(found.read) for b in (found.read, found.core, found.write))
    return replace(found, index=(0, 0), read=read, core=core_box, write=write)


@lru_cache(maxsize=4096)
def tile_peak(
    spec: UNetSpec, train: TrainSpec, tile: Tile, batch: int, keep_gradients: bool, device: Device
) -> int:
    """Peak bytes of a rank whose largest tile is this one, run `batch` at a time.

    With several batches of tiles the gradients of those before are there as well.
    """
    shape = (batch, spec.in_channels, *tile.read.shape)
    return peak_bytes(spec, shape, train, tile=tile, keep_gradients=keep_gradients, device=device)[
        0
    ]


def reading(setting: Setting, node_bytes: float, all_bytes: float) -> float:
    """Seconds to read, each node's ranks sharing its rate and all nodes the file system's."""
    files = setting.machine.file_system
    return max(node_bytes / files.node_bytes_per_second, all_bytes / files.total_bytes_per_second)


def sample_parallel(
    setting: Setting, gpus: int, tile: int, *, only_fitting: bool = False
) -> Outcome:
    """Tiles of `tile` pixels a side over `gpus` ranks.

    `only_fitting` : do not time what does not fit the memory; its seconds are then infinite.
    """
    spec, train, machine = setting.spec, setting.train, setting.machine
    kinds = kinds_of(setting, tile)
    shares = shares_of(setting, kinds, gpus)
    most = int(shares.tiles.sum(axis=1).max())
    stacked = min(train.batch, int(shares.tiles.max()))
    peak = tile_peak(
        spec,
        train,
        largest_kind(spec, setting.shape, tile, train.halo, setting.cropped),
        stacked,
        most > stacked,
        setting.device,
    )
    have = machine.processor.memory_bytes
    if only_fitting and peak > have:
        return unfit(gpus, peak, f"a tile {misfit(peak, have)}", tile=tile)
    ranks = rank_seconds(train, shares, timed(setting, tile))
    members = members_of(gpus, machine.num_devices, machine.per_socket)
    images = setting.num_images(gpus)
    num_tiles = kinds.num_tiles * images

    exposed, sent = 0.0, np.zeros(3)
    for size in small_messages(spec, train, num_tiles):
        found = sum_of(setting, members, size)
        exposed += found.seconds
        sent += found.link_bytes
    if setting.all_reduce == "end":
        sizes = gradient_buckets(spec)
    else:
        sizes = tuple(size for size, _ in ddp_buckets(spec))
    sums = [sum_of(setting, members, size) for size in sizes]
    for found in sums:
        sent += found.link_bytes
    if setting.all_reduce == "end":
        exposed += sum(found.seconds for found in sums)
    elif gpus > 1:
        by_size = np.argsort(kinds.read_pixels, kind="stable")
        last = by_size[(shares.tiles[:, by_size] > 0).argmax(axis=1)]
        working = shares.tiles.sum(axis=1) > 0
        each = passes(spec, setting.cost, kinds)
        exposed += hidden_sum(
            setting, each, ranks.seconds, np.where(working, last, -1), [s.seconds for s in sums]
        )

    read_of = (
        spec.in_channels * setting.pixel_bytes * kinds.inside_pixels
        + 2 * _LABEL_BYTES * kinds.write_pixels
    ) / kinds.count  # fmt: skip
    all_bytes = float(read_of @ kinds.count) * images
    # As if every rank of a node had as much to read as the one that has most.
    node_bytes = float((shares.tiles @ read_of).max()) * min(gpus, machine.num_devices)
    mean = ranks.mean(ranks.seconds)
    bare = ranks.mean(ranks.bare_seconds)
    return Outcome(
        gpus,
        terms_of(
            compute=bare,
            halo_redundancy=mean - bare,
            imbalance=ranks.slowest - mean,
            update=setting.update_seconds(setting.num_parameters),
            all_reduce=exposed,
            reading=reading(setting, node_bytes, all_bytes),
        ),
        peak,
        feasible=peak <= have,
        reason="" if peak <= have else f"a tile {misfit(peak, have)}",
        idle_gpus=shares.num_idle,
        num_tiles=num_tiles,
        tile=tile,
        all_reduce_bytes=(float(sent[0]), float(sent[1]), float(sent[2])),
        read_bytes=all_bytes,
        read_pixels=int(kinds.read_pixels @ kinds.count) * images,
    )


def hidden_sum(
    setting: Setting, each: Passes, seconds: Floats, last: NDArray[np.int64], sums: Sequence[float]
) -> float:
    """Seconds that the sums of DDP's buckets go on after the slowest rank's last backward pass.

    A bucket can be summed once it is ready on every rank, and the sum before it is done.
    `seconds` and `last` are each group's total and the kind it runs last (-1: it runs none); as
    tiles are dealt, that is its smallest.
    """
    train = setting.train
    backward = each.backward + (each.forward if train.recompute in ("block", "stage") else 0.0)
    # Seconds of a backward pass that are left when the gradients of a layer are there.
    left = np.concatenate((np.zeros((1, backward.shape[1])), np.cumsum(backward, axis=0)))
    end = 0.0
    for (_, row), duration in zip(ddp_buckets(setting.spec), sums, strict=True):
        ready: Floats = seconds - np.where(last >= 0, left[row, last], 0.0)
        end = max(end, float(ready.max())) + duration
    return max(0.0, end - float(seconds.max()))
