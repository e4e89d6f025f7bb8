"""The gradient of a whole image's mean loss, from tiles spread over ranks.

Each rank runs its tiles one after another, so that memory is that of one tile. A tile's loss is
divided by the weight of the labelled pixels of all tiles on all ranks, gradients are added up and
summed over the ranks once. For networks whose tiles are exact (no norm, or batch norm with frozen
statistics) the result is the gradient that the whole image gives in one piece, to rounding, for
any tiles and any number of ranks; ranks without a tile included.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from bigunet.errors import ExactnessError, SpecError, fail
from bigunet.losses import Objective, Totals
from bigunet.model import UNet
from bigunet.ranks import Ranks, current
from bigunet.recompute import run_recomputed
from bigunet.scenes import Normalise
from bigunet.spec import Loss, Precision, Recompute
from bigunet.tile_reader import Sample, TileReader
from bigunet.tiles import Tile

__all__ = [
    "StepResult",
    "check_exact",
    "copy_weights",
    "deal_tiles",
    "exact_step",
    "narrowed",
    "step",
    "tile_logits",
]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step: the loss over all tiles, their labelled pixels, and this rank's share.

    `tiles` is how many tiles this rank ran (those without a labelled pixel are skipped).
    """

    loss: float
    pixels: int
    pixels_of_class: tuple[int, ...]
    tiles: int
    seconds: float


def deal_tiles(tiles: Sequence[Tile], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Indices of each rank's tiles: largest first, each to the rank with the least area to read.

    The same on every rank. No rank gets more than 4/3 of the best possible share (Graham 1969,
    doi 10.1137/0117039).
    """
    loads = [0] * num_ranks
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(tiles)), key=lambda i: (-tiles[i].read.area, i)):
        rank = loads.index(min(loads))
        loads[rank] += tiles[index].read.area
        dealt[rank].append(index)
    return tuple(tuple(sorted(share)) for share in dealt)


def check_exact(model: UNet) -> None:
    """Raise `ExactnessError` where tiles of this network, as it stands, differ from the image."""
    spec = model.spec
    reason, remedy = "", ""
    if not spec.tile_exact:
        reason = f'norm="{spec.norm}" averages over whatever extent it sees, a tile or the image'
        remedy = 'Use norm="none", or norm="batch" with frozen statistics'
    elif any(isinstance(m, nn.BatchNorm2d) and m.training for m in model.modules()):
        reason = "batch norm in training mode takes its statistics from the tile it sees"
        remedy = "Freeze them (train.freeze_norm), after train.calibrate_norm"
    elif any(isinstance(m, nn.Dropout2d) and m.training and m.p > 0 for m in model.modules()):
        reason = "dropout draws a mask for each tile where the whole image has one"
        remedy = "Set dropout=0, or call model.eval()"
    if reason:
        fail(
            ExactnessError,
            rule="tiles give the whole image's gradient only where every layer sees the same "
            "through a tile as through the image",
            got=reason,
            remedy=f"{remedy}; or pass exact=False and accept the difference.",
        )


def exact_step(
    model: UNet,
    image: object,
    labels: object,
    tiles: Sequence[Tile],
    *,
    loss: Loss | Objective = "cross_entropy",
    class_weights: tuple[float, ...] | None = None,
    label_smoothing: float = 0.0,
    ignore: int = 255,
    normalise: Normalise | None = None,
    precision: Precision = "fp32",
    recompute: Recompute = "none",
    batch: int = 1,
    ranks: Ranks | None = None,
    exact: bool = True,
) -> StepResult:
    """Set every parameter's `.grad` to the gradient of the mean loss over all tiles.

    Every rank calls this with the same arguments and ends with the same gradients.

    Parameters
    ----------
    image, labels : (band, y, x) and (y, x), scenes or arrays, read tile by tile.
    tiles : `tile_image(...)` for the whole image, or any of its tiles.
    loss, class_weights, label_smoothing, ignore : see `bigunet.losses.Objective`, which may be
        given as `loss`.
    normalise : applied to pixels, e.g. `bigunet.scenes.normalisation(scene)`.
    precision : "fp32": the parameters' own (float64 too); "bf16-autocast"; "bf16": for models
        from `narrowed`; gradients are added up in fp32.
    recompute : what is recomputed in the backward pass, e.g. each "block"; see
        `bigunet.recompute`, the tile being the last micro-batch of one stage.
    batch : tiles of one geometry that are run at once.
    ranks : by default those of the default process group.
    exact : False admits networks whose tiles differ from the whole image.

    Raises
    ------
    ExactnessError : see `check_exact`. SceneError : bands, sizes, labels outside the classes, or
    nothing labelled. SpecError : class weights or precision that do not fit.
    """
    spec = model.spec
    reader = TileReader.of(spec, image, labels, normalise=normalise, ignore=ignore)
    if not isinstance(loss, Objective):
        loss = Objective(spec.classes, loss, class_weights, label_smoothing, ignore)
    return step(
        model,
        reader,
        [Sample(tile) for tile in tiles],
        loss,
        precision=precision,
        recompute=recompute,
        batch=batch,
        ranks=ranks,
        exact=exact,
    )


def step(
    model: UNet,
    reader: TileReader,
    samples: Sequence[Sample],
    objective: Objective,
    *,
    precision: Precision = "fp32",
    recompute: Recompute = "none",
    batch: int = 1,
    ranks: Ranks | None = None,
    exact: bool = True,
    into: nn.Module | None = None,
) -> StepResult:
    """`exact_step` for samples: tiles that may be turned and changed in brightness.

    `into` : another module with the same parameters that gets the gradients, in its own
    precision: the fp32 master copy of a bf16 network.
    """
    began = time.perf_counter()
    ranks = current() if ranks is None else ranks
    _check_precision(model, precision)
    if exact:
        check_exact(model)
    per_tile = _count(reader, samples, objective, ranks)
    labelled = [i for i, counts in enumerate(per_tile) if counts[:-1].any()]
    shares = deal_tiles([samples[i].tile for i in labelled], ranks.size)
    mine = [labelled[i] for i in shares[ranks.rank]]
    stacks = list(_stacks(samples, mine, batch))

    classes = objective.classes
    counts = per_tile.sum(0)
    zeros = torch.zeros(classes, dtype=torch.float64)
    totals = Totals(torch.from_numpy(counts[:-1]).double(), zeros, zeros.clone())

    def forward(stack: Sequence[int]) -> tuple[Tensor, Tensor]:
        tile = samples[stack[0]].tile
        x = np.stack([reader.pixels(samples[i]) for i in stack])
        y = np.stack([reader.truth(samples[i]) for i in stack])
        logits = tile_logits(model, torch.from_numpy(x), tile, precision, recompute)
        return logits, torch.from_numpy(y).to(logits.device)

    # With one stack to run, its graph can wait for the sums; with more, only one fits in memory
    # and the forward pass is done twice.
    kept: list[tuple[Tensor, Tensor]] = []
    if objective.two_passes:
        with _first_pass(model, keep_graph=len(stacks) == 1):
            for stack in stacks:
                outputs = forward(stack)
                overlap, predicted = objective.sums(*outputs)
                totals.overlap.add_(overlap.detach().double().cpu())
                totals.predicted.add_(predicted.detach().double().cpu())
                if len(stacks) == 1:
                    kept.append(outputs)
                del outputs
        ranks.sum_all_([totals.overlap, totals.predicted])
    target = model if into is None else into
    gradients = _Gradients(model, target)
    entropy = torch.zeros(1, dtype=torch.float64)
    for stack in stacks:
        logits, truth = kept.pop() if kept else forward(stack)
        part, value = objective.part(logits, truth, totals)
        part.backward()
        entropy += float(value)
        gradients.collect()
        del logits, truth, part
    gradients.finish(ranks)
    ranks.sum_(entropy)
    return StepResult(
        loss=float(entropy) + objective.dice(totals),
        pixels=int(counts[:-1].sum()),
        pixels_of_class=tuple(int(n) for n in counts[:-1]),
        tiles=len(mine),
        seconds=time.perf_counter() - began,
    )


def tile_logits(
    model: UNet,
    x_BCHW: Tensor,
    tile: Tile,
    precision: Precision = "fp32",
    recompute: Recompute = "none",
) -> Tensor:
    """Logits of `tile.write` in the given precision; pixels are moved to the model's device."""
    weight = next(model.parameters())
    x = x_BCHW.to(weight.device, weight.dtype)
    if weight.dtype != torch.float64:
        x = x.contiguous(memory_format=torch.channels_last)
    enabled = precision == "bf16-autocast"
    with torch.autocast(weight.device.type, torch.bfloat16, enabled=enabled):
        return run_recomputed(model, x, tile, recompute)


def narrowed(model: UNet) -> UNet:
    """A copy with convolutions in bf16; norms and their statistics stay as they are."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            module.bfloat16()
    return copied


@torch.no_grad()
def copy_weights(model: UNet, copied: UNet) -> None:
    """Bring a `narrowed` copy's weights up to the model's, rounded; statistics stay."""
    for weight, master in zip(copied.parameters(), model.parameters(), strict=True):
        weight.copy_(master)


def _check_precision(model: UNet, precision: Precision) -> None:
    dtype = next(model.parameters()).dtype
    if (precision == "bf16") != (dtype == torch.bfloat16):
        fail(
            SpecError,
            rule='precision "bf16" is for bf16 weights, and they for it',
            got=f'precision "{precision}" with weights in {dtype}',
            remedy='Convert it with `narrowed(model)`, or use "bf16-autocast".',
        )


def _count(
    reader: TileReader,
    samples: Sequence[Sample],
    objective: Objective,
    ranks: Ranks,
) -> np.ndarray:
    """(tiles, classes + 1) pixels, see `Objective.count`; every rank reads its share of labels.

    Faults are raised after the sum, hence on every rank: no rank is left waiting.
    """
    counts = np.zeros((len(samples), objective.classes + 1), np.int64)
    for index in range(ranks.rank, len(samples), ranks.size):
        counts[index] = objective.count(reader.truth(samples[index]))
    ranks.sum_(torch.from_numpy(counts))
    objective.check(counts.sum(0) if len(counts) else np.zeros(objective.classes + 1, np.int64))
    return counts


def _stacks(samples: Sequence[Sample], mine: Sequence[int], batch: int) -> Iterator[list[int]]:
    """Groups of at most `batch` tiles that one pass can take: the same sizes and crops."""

    def geometry(index: int) -> tuple[object, ...]:
        tile = samples[index].tile
        return tile.read.shape, tile.crops, tile.out

    groups: dict[tuple[object, ...], list[int]] = {}
    for index in mine:
        groups.setdefault(geometry(index), []).append(index)
    for group in groups.values():
        cuts = [*range(0, len(group), batch), len(group)]
        yield from (group[a:b] for a, b in pairwise(cuts))


@contextmanager
def _first_pass(model: nn.Module, *, keep_graph: bool) -> Iterator[None]:
    """No graph unless asked for, and no running statistics from a pass that is done again."""
    if keep_graph:
        yield
        return
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    momenta = [m.momentum for m in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        with torch.no_grad():
            yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


class _Gradients:
    """Adds up gradients over tiles in at least fp32, then over ranks."""

    def __init__(self, model: nn.Module, target: nn.Module) -> None:
        self._sources = [p for p in model.parameters() if p.requires_grad]
        self._targets = [p for p in target.parameters() if p.requires_grad]
        narrow = self._sources and self._sources[0].dtype == torch.bfloat16
        self._wide = [p.new_zeros(p.shape, dtype=torch.float32) for p in self._sources if narrow]
        for parameter in (*self._sources, *self._targets):
            parameter.grad = None

    def collect(self) -> None:
        for wide, source in zip(self._wide, self._sources, strict=bool(self._wide)):
            if source.grad is not None:
                wide += source.grad
                source.grad = None

    def finish(self, ranks: Ranks) -> None:
        sums = self._wide or [
            torch.zeros_like(p) if p.grad is None else p.grad for p in self._sources
        ]
        ranks.sum_all_(sums)
        for target, total in zip(self._targets, sums, strict=True):
            target.grad = total.to(target.dtype)
