"""The alternative to halos: each GPU keeps a block of the image, and rows are exchanged.

Before each convolution neighbours send each other the rows of its input that they need, forward
and, for the gradients, backward. Nothing is computed twice, but every convolution waits for its
rows. A model only: bigunet does not run it.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from bigunet.cost import value_bytes
from bigunet.geometry import padded_size
from bigunet.layers import LayerRow, layer_table
from bigunet.machines import Device, Machine
from bigunet.memory import peak_bytes
from bigunet.scaling.axis import tile_kinds
from bigunet.scaling.collective import members_of
from bigunet.scaling.messages import ddp_buckets, gradient_buckets, small_messages
from bigunet.scaling.sample_parallel import hidden_sum, reading
from bigunet.scaling.setting import Outcome, Setting, misfit, sum_of, terms_of, unfit
from bigunet.scaling.work import passes
from bigunet.spec import TrainSpec, UNetSpec

__all__ = ["block_grid", "exchange_rows", "halo_exchange"]


@lru_cache(maxsize=65536)
def block_grid(height: int, width: int, gpus: int) -> tuple[int, int, int, int]:
    """(rows, columns, block height, block width) of `gpus` blocks, in units of the stride.

    Of all ways to write `gpus` as a product, the one whose largest block is smallest and, of
    those, has the shortest borders inside the image.
    """
    ways = []
    for rows in range(1, gpus + 1):
        if gpus % rows == 0:
            columns = gpus // rows
            h, w = -(-height // rows), -(-width // columns)
            border = (rows - 1) * width + (columns - 1) * height
            ways.append((h * w, border, rows, columns, h, w))
    _, _, rows, columns, h, w = min(ways)
    return rows, columns, h, w


@lru_cache(maxsize=8192)
def _flows(
    rows: int, columns: int, num_devices: int, per_socket: int
) -> tuple[tuple[int, ...], ...]:
    """For vertical and for horizontal neighbours: pairs inside, across, and flows out of a node."""
    ids = np.arange(rows * columns).reshape(rows, columns)
    found = []
    for here, there in ((ids[:-1], ids[1:]), (ids[:, :-1], ids[:, 1:])):
        a, b = here.ravel(), there.ravel()
        remote = a // num_devices != b // num_devices
        across = ~remote & (a % num_devices // per_socket != b % num_devices // per_socket)
        out = np.bincount(np.concatenate((a[remote], b[remote])) // num_devices)
        most = int(out.max()) if len(out) else 0
        found.append((int((~remote & ~across).sum()), int(across.sum()), most))
    return tuple(found)


def exchange_rows(rows: tuple[LayerRow, ...], kernel: int) -> list[tuple[int, int, int, bool]]:
    """(level, channels, rows of a border, backward) of each exchange of one training pass.

    Forward a convolution needs its input's rows, backward its output's gradient's; the first
    layer's input has no gradient. Bilinear up-sampling reaches one pixel on each side.
    """
    found = []
    for i, row in enumerate(rows):
        # Rows of bilinear up-sampling lie one level down.
        bilinear = row.kind == "up" and not row.parameters and row.flops > 0
        reach = kernel // 2 if row.kind == "conv" else 1 if bilinear else 0
        if reach:
            found.append((row.level + bilinear, row.in_shape[1], reach, False))
            if i:
                found.append((row.level, row.out_shape[1], reach, True))
    return found


@lru_cache(maxsize=4096)
def _block_peak(
    spec: UNetSpec,
    train: TrainSpec,
    height: int,
    width: int,
    batch: int,
    keep: bool,
    device: Device,
) -> int:
    shape = (batch, spec.in_channels, height, width)
    return peak_bytes(spec, shape, train, keep_gradients=keep, device=device)[0]


def _rough_peak(
    spec: UNetSpec,
    train: TrainSpec,
    block: tuple[int, int],
    have: int,
    batch: int,
    keep: bool,
    device: Device,
) -> int:
    """The peak of a larger square block if that fits, of a smaller one if that does not, or 0.

    Squares of few sizes stand for many blocks where only the answer counts, not the bytes.
    """
    stride = spec.stride
    step = 2 * math.log2(math.sqrt(block[0] * block[1]) / stride)
    for power in (math.ceil(step + 0.5), math.floor(step - 0.5)):
        side = stride * max(1, round(2 ** (power / 2)))
        peak = _block_peak(spec, train, side, side, batch, keep, device)
        larger = side * side >= block[0] * block[1]
        if (peak <= have) == larger:
            return peak
    return 0


def _exchange(
    setting: Setting, grid: tuple[int, int], block: tuple[int, int], images: int
) -> tuple[float, float]:
    """Seconds and bytes of all exchanges of a step."""
    spec, machine, train = setting.spec, setting.machine, setting.train
    size = value_bytes(train.precision)
    rows = layer_table(spec, (1, spec.in_channels, spec.stride, spec.stride))
    again = 2 if train.recompute in ("block", "stage") else 1
    flows = _flows(*grid, machine.num_devices, machine.per_socket)
    stacks = -(-images // train.batch)
    seconds = sent = 0.0
    parts = exchange_rows(rows, spec.kernel)
    # The same number of bytes to each neighbour on an axis: seconds are linear in them.
    for axis in (0, 1):
        if grid[axis] == 1:
            continue
        rates = _rates(machine, flows[axis])
        side = block[1 - axis]
        whole = padded_size(setting.shape[1 - axis], spec.stride)
        for level, channels, reach, backward in parts:
            times = 1 if backward else again
            each = float(size * channels * reach) * (side >> level)
            latency_and_bytes = max(
                stacks * latency + images * each / rate for latency, rate in rates
            )
            seconds += times * latency_and_bytes
            sent += (
                times * images * 2 * (grid[axis] - 1) * size * channels * reach * (whole >> level)
            )
    return seconds, sent


def _rates(machine: Machine, flows: tuple[int, ...]) -> list[tuple[float, float]]:
    inside, across, out = flows
    links = []
    if inside:
        links.append((machine.inside.latency_seconds, machine.inside.bytes_per_second))
    if across:
        links.append((machine.across.latency_seconds, machine.across.bytes_per_second))
    if out:
        rate = min(machine.network.bytes_per_second, machine.injection_bytes_per_second / out)
        links.append((machine.network.latency_seconds, rate))
    return links


def halo_exchange(setting: Setting, gpus: int, *, only_fitting: bool = False) -> Outcome:
    """Blocks of every image over `gpus` GPUs, `train.batch` images at a time.

    `only_fitting` : do not time what does not fit the memory; its seconds are then infinite.
    """
    spec, train, machine = setting.spec, setting.train, setting.machine
    stride = spec.stride
    padded = tuple(padded_size(n, stride) for n in setting.shape)
    _, _, h, w = block_grid(padded[0] // stride, padded[1] // stride, gpus)
    block = (h * stride, w * stride)
    kinds = tile_kinds(spec, setting.shape, block, halo=0)
    used = (-(-padded[0] // block[0]), -(-padded[1] // block[1]))
    images = setting.num_images(gpus)
    have = machine.processor.memory_bytes
    how = (min(images, train.batch), images > train.batch, setting.device)
    peak = _rough_peak(spec, train, block, have, *how) if only_fitting else 0
    peak = peak or _block_peak(spec, train, *block, *how)
    reason = "" if peak <= have else f"a block of {block[0]} x {block[1]} {misfit(peak, have)}"
    if gpus > 1 and min(h, w) < spec.kernel // 2:
        reason = (
            f"a block of {block[0]} x {block[1]} is narrower at the lowest level than the "
            f"{spec.kernel // 2} pixels that a neighbour needs"
        )
    if only_fitting and reason:
        return unfit(gpus, peak, reason, tile=block[0])
    full, rest = divmod(images, train.batch)
    # Dice needs the sums over the image first: the forward pass twice, unless the graph is kept.
    twice = "dice" in train.loss and full + (rest > 0) > 1
    seconds = np.zeros(len(kinds.count))
    for number, batch in ((full, train.batch), (1, rest)):
        if number and batch:
            each = passes(spec, setting.cost, kinds, batch)
            seconds += number * (each.total(train) + twice * each.forward.sum(axis=0))
    mean = float(seconds @ kinds.count) / gpus
    exchange, exchanged = _exchange(setting, used, block, images)

    members = members_of(gpus, machine.num_devices, machine.per_socket)
    small = [sum_of(setting, members, size) for size in small_messages(spec, train, images)]
    if setting.all_reduce == "end":
        sizes = gradient_buckets(spec)
    else:
        sizes = tuple(size for size, _ in ddp_buckets(spec))
    sums = [sum_of(setting, members, size) for size in sizes]
    exposed = sum(found.seconds for found in small)
    if setting.all_reduce == "end":
        exposed += sum(found.seconds for found in sums)
    elif gpus > 1:
        each = passes(spec, setting.cost, kinds)
        last = np.arange(len(seconds))
        exposed += hidden_sum(setting, each, seconds, last, [s.seconds for s in sums])
    sent = np.sum([found.link_bytes for found in (*small, *sums)], axis=0)
    pixels = setting.shape[0] * setting.shape[1] * images
    read = (spec.in_channels * setting.pixel_bytes + 2) * pixels
    block_read = (spec.in_channels * setting.pixel_bytes + 2) * block[0] * block[1] * images
    node_read = min(read, block_read * min(gpus, machine.num_devices))
    return Outcome(
        gpus,
        terms_of(
            compute=mean,
            imbalance=float(seconds.max()) - mean,
            update=setting.update_seconds(setting.num_parameters),
            all_reduce=exposed,
            halo_exchange=exchange,
            reading=reading(setting, node_read, read),
        ),
        peak,
        feasible=not reason,
        reason=reason,
        idle_gpus=gpus - used[0] * used[1],
        num_tiles=used[0] * used[1] * images,
        tile=block[0],
        all_reduce_bytes=(float(sent[0]), float(sent[1]), float(sent[2])),
        exchange_bytes=exchanged,
        read_bytes=read,
        read_pixels=pixels,
    )
