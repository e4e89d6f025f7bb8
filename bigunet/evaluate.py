"""Scores of a network on labelled pixels, tile by tile and on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from bigunet.metrics import Confusion
from bigunet.model import UNet
from bigunet.ranks import Ranks, current
from bigunet.sample_parallel import tile_logits
from bigunet.spec import Precision
from bigunet.tile_reader import Sample, TileReader
from bigunet.tiles import tile_image

__all__ = ["evaluate", "labelled_logits"]


@torch.no_grad()
def labelled_logits(
    model: UNet,
    reader: TileReader,
    *,
    tile: int = 512,
    precision: Precision = "fp32",
    ranks: Ranks | None = None,
) -> Iterator[tuple[Tensor, np.ndarray]]:
    """Logits (classes, height, width) and labels (height, width) of this rank's exact tiles.

    Tiles are dealt to the ranks in turn; those without a labelled pixel are passed over. The
    model is in eval mode meanwhile.
    """
    ranks = current() if ranks is None else ranks
    spec = model.spec
    side = max(spec.stride, tile // spec.stride * spec.stride)
    height, width = (min(side, size // spec.stride * spec.stride) for size in reader.shape)
    with _eval_mode(model):
        for one in tile_image(reader.shape, (height, width), spec)[ranks.rank :: ranks.size]:
            truth = reader.truth(Sample(one))
            if (truth != reader.ignore).any():
                pixels = torch.from_numpy(reader.pixels(Sample(one)))[None]
                yield tile_logits(model, pixels, one, precision)[0], truth


def evaluate(
    model: UNet,
    reader: TileReader,
    *,
    tile: int = 512,
    precision: Precision = "fp32",
    names: Sequence[str] | None = None,
    leave_out: Sequence[int | str] = (),
    ranks: Ranks | None = None,
) -> xr.Dataset:
    """Scores of the model's labels over all labelled pixels, see `bigunet.metrics.Confusion`."""
    ranks = current() if ranks is None else ranks
    confusion = Confusion(model.spec.classes, reader.ignore)
    for logits, truth in labelled_logits(
        model, reader, tile=tile, precision=precision, ranks=ranks
    ):
        confusion.add(logits.argmax(0).cpu().numpy(), truth)
    ranks.sum_(confusion.matrix)
    return confusion.table(names, leave_out=leave_out)


@contextmanager
def _eval_mode(model: torch.nn.Module) -> Iterator[None]:
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was in training.items():
            module.training = was
