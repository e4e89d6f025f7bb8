"""Measured scaling: real sample-parallel steps on 1, 2, ... ranks, strong or weak.

One world of ranks is started (or, inside a batch allocation, is there already), and each number of
ranks r to be measured takes the first r of it, as a group of its own, while the others wait. So
all numbers are measured in turn in the same processes, round by round, and nothing is started
twice. A step is what training does: read the tiles, forward and backward passes, the sum of the
gradients, the optimiser.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr

from bigunet.calibrate import freeze_norm
from bigunet.environment import cores, cpu_model
from bigunet.errors import SpecError, fail
from bigunet.launch import launch
from bigunet.losses import Objective
from bigunet.model import UNet
from bigunet.optimisers import optimiser
from bigunet.progress import Progress
from bigunet.ranks import Ranks, current, init
from bigunet.sample_parallel import copy_weights, narrowed, step
from bigunet.scaling_file import new_scaling, save_scaling
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tile_reader import Sample, TileReader
from bigunet.tiles import count_tiles, tile_image

__all__ = ["ScalingStep", "group_of", "measure_scaling", "slowest"]


def measure_scaling(
    spec: UNetSpec,
    train: TrainSpec,
    scene_shape: tuple[int, int],
    ranks: Sequence[int] = (1, 2),
    *,
    images: int = 1,
    weak: bool = False,
    rounds: int = 3,
    threads: int = 1,
    out: Path | None = None,
    progress: bool = True,
) -> xr.Dataset:
    """Seconds of training steps by the number of ranks; see `bigunet.scaling_file` for the table.

    Parameters
    ----------
    train : tile, halo, batch, precision, recomputation, loss and optimiser count. Pixels and
        labels are random.
    scene_shape : (height, width) of an image in pixels, cut into tiles.
    ranks : numbers of ranks. In a world that torchrun or a batch system started, up to its size,
        and every rank calls this function; else they are started here.
    images : in a step; with `weak` for each rank, so that the work grows with the ranks.
    rounds : steps of each number, after one to warm up.
    threads : CPU threads of a rank.
    out : NetCDF file, written anew after each step, so that a stopped run keeps what it has.

    Raises
    ------
    SpecError : no rank, image or round, or more ranks than the world has. ShapeError : a tile
    that the image cannot have. LaunchError : ranks that fail.
    """
    counts = sorted(set(ranks))
    world = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else None
    faults = [f"{name} is at least 1" for name, n in (("images", images), ("rounds", rounds),
                                                      ("threads", threads)) if n < 1]  # fmt: skip
    if not counts or counts[0] < 1:
        faults.append("ranks are numbers >= 1")
    elif world is not None and counts[-1] > world:
        faults.append(f"ranks are at most those of the world that was started, {world}")
    if faults:
        fail(
            SpecError,
            rule=f"to measure scaling, {', '.join(faults)}",
            got=f"ranks {list(ranks)}, {images} images, {rounds} rounds, {threads} threads",
            remedy="Change them.",
        )
    tiles = count_tiles(scene_shape, train.tile, spec)
    _warn(counts, threads, tiles * images, weak, world is None)
    call: dict[str, Any] = {
        "spec": spec, "train": train, "scene_shape": scene_shape, "counts": counts,
        "images": [images * r if weak else images for r in counts], "weak": weak,
        "rounds": rounds, "threads": threads, "out": out, "progress": progress,
    }  # fmt: skip
    if world is None:
        table: xr.Dataset = launch(
            _on_ranks, kwargs=call, ranks=counts[-1], threads_per_rank=threads, progress=progress
        )
        return table
    with init():
        return _on_ranks(**call)


def _warn(counts: Sequence[int], threads: int, tiles: int, weak: bool, started: bool) -> None:
    idle = 0 if weak else counts[-1] - tiles
    if idle > 0:
        warnings.warn(
            f"{counts[-1]} ranks have {tiles} tiles: {idle} of them "
            f"({100 * idle / counts[-1]:.0f} %) are idle",
            stacklevel=3,
        )
    if started and not torch.cuda.is_available() and counts[-1] * threads > cores():
        warnings.warn(
            f"{counts[-1]} ranks of {threads} threads share {cores()} cores, so that their times "
            "say nothing of as many processors",
            stacklevel=3,
        )


# On every rank ----------------------------------------------------------------------------------


def _on_ranks(
    spec: UNetSpec,
    train: TrainSpec,
    scene_shape: tuple[int, int],
    counts: list[int],
    images: list[int],
    weak: bool,
    rounds: int,
    threads: int,
    out: Path | None,
    progress: bool,
) -> xr.Dataset:
    world = current()
    torch.set_num_threads(threads)
    groups = {r: group_of(world, r) for r in counts}
    work = ScalingStep(spec, train, scene_shape, world)
    device = world.device.type
    table = new_scaling(
        spec,
        train,
        scene_shape,
        counts,
        kind="weak" if weak else "strong",
        images=images,
        num_tiles=[len(work.tiles) * n for n in images],
        rounds=rounds,
        threads=threads,
        device=torch.cuda.get_device_name(world.device) if device == "cuda" else cpu_model(),
    )
    total = (rounds + 1) * len(counts)
    with Progress(total, "scaling", shown=progress and world.first) as bar:
        for number in range(rounds + 1):
            for i, (r, n) in enumerate(zip(counts, images, strict=True)):
                work.reset()
                world.wait()
                seconds = work.run(groups[r], n) if world.rank < r else 0.0
                seconds = slowest(world, seconds)
                if number:  # the first one warms up
                    table["step_seconds"].values[i, number - 1] = seconds
                    if out is not None and world.first:
                        save_scaling(table, out)
                bar.update(1, ranks=r, seconds=seconds)
    return table


def group_of(world: Ranks, size: int) -> Ranks:
    """The first `size` ranks of the world as a group of their own; every rank calls this."""
    if size == world.size:
        return world
    group = dist.new_group(range(size))
    return replace(world, size=size, group=group)


def slowest(world: Ranks, value: float) -> float:
    """The largest value of all ranks, on each of them."""
    if world.size == 1:
        return value
    box = torch.tensor([value], dtype=torch.float64, device=world.device)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box)


class ScalingStep:
    """The network, its optimiser and a random image; `run` is one timed training step.

    Arguments are those of `measure_scaling`; `tiles` are the image's.
    """

    def __init__(
        self, spec: UNetSpec, train: TrainSpec, shape: tuple[int, int], world: Ranks
    ) -> None:
        rng = np.random.default_rng(train.seed)
        image = rng.standard_normal((spec.in_channels, *shape), np.float32)
        labels = rng.integers(0, spec.classes, shape, np.uint8)
        self.train = train
        self.tiles = tile_image(shape, train.tile, spec, halo=train.halo)
        self.reader = TileReader.of(spec, image, labels)
        self.objective = Objective(
            spec.classes, train.loss, train.class_weights, train.label_smoothing
        )
        torch.manual_seed(train.seed)
        model = UNet(spec).to(world.device)
        self.model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model.train()
        if train.freeze_norm:
            freeze_norm(self.model)
        self.worker = narrowed(self.model) if train.precision == "bf16" else self.model
        self.optimiser = optimiser(self.model, train)
        self.start = {k: v.clone() for k, v in self.model.state_dict().items()}

    def reset(self) -> None:
        """The weights of the beginning: ranks that waited have not moved theirs."""
        self.model.load_state_dict(self.start)

    def run(self, ranks: Ranks, images: int) -> float:
        """Seconds of a step over `images` images, on this rank."""
        samples = [Sample(tile) for _ in range(images) for tile in self.tiles]
        began = time.perf_counter()
        if self.worker is not self.model:
            copy_weights(self.model, self.worker)
        step(
            self.worker,
            self.reader,
            samples,
            self.objective,
            precision=self.train.precision,
            recompute=self.train.recompute,
            batch=self.train.batch,
            ranks=ranks,
            exact=False,
            into=self.model,
        )
        self.optimiser.step()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        return time.perf_counter() - began
