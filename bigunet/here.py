"""This computer as a machine: rates and links timed in a few seconds, and remembered.

All ranks work at once while rates are timed, as they do in a step: they share caches, memory and
the processor's clock. The result is kept as a machine file in the user's cache folder, named by
what it depends on: the CPU, torch's version, the number of ranks and of their threads.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from bigunet.environment import cores, cpu_model, version_of
from bigunet.errors import BigUNetError, SpecError, fail
from bigunet.launch import launch
from bigunet.losses import Objective
from bigunet.machines import FileSystem, Link, Machine, Processor, load_machine, save_machine
from bigunet.machines import device as device_of
from bigunet.ranks import current
from bigunet.spec import UNetSpec
from bigunet.tile_reader import Sample, TileReader
from bigunet.tiles import tile_image

__all__ = ["cache_file", "here", "time_link"]

_CALIBRATION = 4  # grows when what is timed changes, so that older files count no more
_MESSAGES = (2**12, 2**16, 2**20, 2**22, 2**24)
_SECONDS = 0.15  # for each quantity


def cache_file(ranks: int, threads: int) -> Path:
    """Where the calibration of so many ranks of so many threads is kept (XDG_CACHE_HOME)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    parts = (_CALIBRATION, cpu_model(), cores(), version_of("torch"), ranks, threads)
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
    return Path(base) / "bigunet" / f"here-{digest}.yaml"


def here(ranks: int | None = None, *, threads: int = 1, refresh: bool = False) -> Machine:
    """This machine as `ranks` devices of `threads` CPU threads each, timed or remembered.

    The peak of a precision is the faster of a matrix product and a 3 x 3 convolution; the memory's
    rate is that of a copy, read and written; the link is the line through times of messages
    between two ranks. `all_reduce` is the line through times of gradient sums over all ranks as
    training makes them (`bigunet.ranks.Ranks.sum_all_`), read as a ring: 2 (R - 1) steps with
    1 / R of the bytes each. The "file system" is memory, read as training reads tiles: checked for
    pixels without data, cast, and their labels counted. Takes under 20 s where nothing is
    remembered.

    Parameters
    ----------
    ranks : one for every `threads` cores by default.
    refresh : time it anew.

    Raises
    ------
    SpecError : fewer than one rank or thread. LaunchError : where ranks do not start.
    """
    ranks = max(1, cores() // max(1, threads)) if ranks is None else ranks
    if ranks < 1 or threads < 1:
        fail(
            SpecError,
            rule="there is at least one rank of at least one thread",
            got=(ranks, threads),
            remedy="Use here().",
        )
    path = cache_file(ranks, threads)
    if not refresh and path.exists():
        # A damaged file is no more than a reason to time again.
        with suppress(BigUNetError):
            return load_machine(path)
    figures = launch(_time_all, ranks=ranks, threads_per_rank=threads, progress=False)
    result = _machine(figures, ranks, threads)
    with suppress(OSError):  # a home that cannot be written costs time, not the answer
        path.parent.mkdir(parents=True, exist_ok=True)
        save_machine(result, path)
    return result


def _machine(figures: dict[str, float], ranks: int, threads: int) -> Machine:
    source = f"timed on {cpu_model()}, torch {version_of('torch')}, {ranks} x {threads} threads"
    processor = Processor(
        f"{threads} thread{'s' if threads > 1 else ''} of {cpu_model()}",
        {p: max(figures[f"matmul {p}"], figures[f"conv {p}"]) for p in ("fp32", "bf16")},
        figures["copy"],
        max(1, device_of("here").memory_bytes // ranks),
        figures["launch"],
        source,
        cuda=False,
    )
    between = Link(
        "between ranks here", figures["rate"], figures["latency"], source, by_processors=True
    )
    shown = ", ".join(
        f"{kind} {p} {figures[f'{kind} {p}'] / 1e9:.0f} GFLOP/s"
        for kind in ("matmul", "conv")
        for p in ("fp32", "bf16")
    )
    return Machine(
        "here",
        processor,
        ranks,
        between,
        between,
        between,
        per_socket=ranks,
        notes=f"Each rank: {shown}.",
        file_system=FileSystem("scenes in memory", figures["files"], figures["files"], source),
        all_reduce=None
        if ranks == 1
        else Link("all-reduce here", figures["sum rate"], figures["sum latency"], source),
    )


def time_link(*, sizes_bytes: Sequence[int] = _MESSAGES, rounds: int = 10) -> Link:
    """The link between two ranks of this machine, started for it, with one thread each.

    Latency and rate of the line through the medians of one-way times (half a round trip).
    """
    sizes = tuple(sizes_bytes)
    seconds = launch(_ping_pong, (sizes, rounds), ranks=2, threads_per_rank=1, progress=False)
    rate, latency = _line(sizes, seconds)
    return Link("between ranks here", rate, latency, "timed by bigunet", by_processors=True)


def _line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """(rate, latency) of the line through times of messages.

    Weighted by 1 / seconds: small messages tell the latency, and must not drown in large ones.
    """
    weights = 1.0 / np.asarray(seconds)
    slope, latency = np.polyfit(np.asarray(sizes, float), seconds, 1, w=weights)
    rate = 1.0 / slope if slope > 0 else sizes[-1] / seconds[-1]
    return float(rate), float(max(latency, 0.0))


# On every rank ----------------------------------------------------------------------------------


def _time_all() -> dict[str, float]:
    """The figures, means over the ranks where each has its own."""
    ranks = current()
    torch.manual_seed(0)
    own: dict[str, float] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a = torch.randn(1024, 1024).to(dtype)
        own[f"matmul {name}"] = 2 * 1024**3 / _seconds(partial(torch.matmul, a, a))
        x = torch.randn(1, 32, 256, 256).to(dtype).contiguous(memory_format=torch.channels_last)
        w = torch.randn(32, 32, 3, 3).to(dtype).contiguous(memory_format=torch.channels_last)
        flops = 2 * 9 * 32 * 32 * 256**2
        own[f"conv {name}"] = flops / _seconds(partial(F.conv2d, x, w, padding=1))
    # Larger than the caches that a core has to itself.
    source, target = torch.zeros(2**24), torch.zeros(2**24)
    own["copy"] = 2 * source.nbytes / _seconds(partial(target.copy_, source))
    one = torch.zeros(1)
    own["launch"] = _seconds(partial(torch.add, one, one))
    own["files"] = _file_rate()
    values = torch.tensor(list(own.values()), dtype=torch.float64)
    ranks.sum_(values)
    figures = dict(zip(own, (values / ranks.size).tolist(), strict=True))
    figures["files"] *= ranks.size  # all of them read at once
    figures["rate"], figures["latency"] = math.inf, 0.0
    if ranks.size > 1:
        figures["rate"], figures["latency"] = _line(_MESSAGES, _ping_pong(_MESSAGES, 10))
        rate, latency = _line(_MESSAGES, _sums(_MESSAGES, 10))
        steps = 2 * (ranks.size - 1)
        figures["sum rate"], figures["sum latency"] = rate * steps / ranks.size, latency / steps
    return figures


def _seconds(work: Callable[[], object]) -> float:
    """Median of one call, timed in groups long enough for the clock; all ranks at once."""
    ranks = current()
    with torch.no_grad():
        work()
        began = time.perf_counter()
        work()
        calls = max(1, round(0.1 * _SECONDS / max(1e-9, time.perf_counter() - began)))
        ranks.wait()
        times: list[float] = []
        end = time.perf_counter() + _SECONDS
        while time.perf_counter() < end or len(times) < 3:
            began = time.perf_counter()
            for _ in range(calls):
                work()
            times.append((time.perf_counter() - began) / calls)
    return median(times)


def _file_rate() -> float:
    """Bytes of pixels (and of labels, read twice) a second, of a tile of an image in memory."""
    spec = UNetSpec(levels=3, channels=1)
    side = 256
    rng = np.random.default_rng(0)
    pixels = rng.standard_normal((spec.in_channels, 2 * side, 2 * side), np.float32)
    labels = rng.integers(0, spec.classes, pixels.shape[1:], np.uint8)
    reader = TileReader.of(spec, pixels, labels)
    objective = Objective(spec.classes)
    sample = Sample(tile_image((2 * side, 2 * side), side, spec)[0])
    tile = sample.tile
    size = pixels.itemsize * spec.in_channels * tile.read.area + 2 * tile.write.area

    def read() -> None:
        objective.count(reader.truth(sample))
        reader.pixels(sample)
        reader.truth(sample)

    return size / _seconds(read)


def _sums(sizes: Sequence[int], rounds: int) -> list[float]:
    """Median seconds that a sum over all ranks of so many bytes adds to work before it.

    As in a step, the ranks come to it from work of their own (some milliseconds of products), wait
    for the slowest and have to wake up: what is counted is the time beyond the longest work.
    """
    ranks = current()
    a = torch.randn(512, 512)
    result = []
    for size in sizes:
        tensors = [torch.zeros(size // 8) for _ in range(2)]
        times = []
        for _ in range(rounds + 1):
            ranks.wait()
            began = time.perf_counter()
            for _ in range(4):
                torch.mm(a, a)
            worked = time.perf_counter() - began
            ranks.sum_all_(tensors)
            both = torch.tensor([worked, time.perf_counter() - began], dtype=torch.float64)
            dist.all_reduce(both, dist.ReduceOp.MAX)
            times.append(max(1e-7, float(both[1] - both[0])))
        result.append(median(times[1:]))
    return result


def _ping_pong(sizes: Sequence[int], rounds: int) -> list[float]:
    """Median seconds of one way between ranks 0 and 1; others wait."""
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
                elif ranks.rank == 1 - source:
                    dist.recv(message, source)
            times.append((time.perf_counter() - began) / 2)
        result.append(median(times[1:]))
    return result
