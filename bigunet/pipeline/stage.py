"""One stage of a plan as a module: the running map and the open skips in, the same out.

All engines run this module. Between ranks its inputs and outputs are plain tensors in a fixed
order, the map first and then each skip that is open at the cut, so that a skip is carried as one
more stage input and output. What travels is contiguous both ways: torch's point-to-point
messages need it, and the gradient of a skip comes out of the concatenation as a strided view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from bigunet.layers import LayerRow, layer_table
from bigunet.memory.segments import cut
from bigunet.model import run_layers
from bigunet.plan import Plan
from bigunet.recompute import run_segment
from bigunet.tiles import Tile

__all__ = ["Stage", "open_at", "wire_tensors"]


def open_at(rows: Sequence[LayerRow], end: int) -> tuple[str, ...]:
    """Names of the skips that are open at a cut before row `end`, oldest first."""
    made = [row.name for row in rows[:end] if row.kind == "skip"]
    joined = {row.source for row in rows[:end] if row.source is not None}
    return tuple(name for name in made if name not in joined)


class Stage(nn.Module):
    """Stage `index` of a plan, made of the network's own layers (not copies).

    `takes` and `sends` name the skips that are open at its two cuts; those that only pass through
    are in both. `micro_batches` calls of `forward` are one pass; `tiles`, if set, holds the tile
    of each of them.
    """

    def __init__(self, plan: Plan, index: int, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        table, cuts = plan.table, plan.cuts
        sizes = [b - a for a, b in pairwise(cuts)]
        self.index, self.last = index, index == plan.num_stages - 1
        self.micro_batches = plan.micro_batches
        self.part = cut(table, sizes)[index]
        blocks = [len(list(rows)) for _, rows in groupby(self.part.rows, key=lambda r: r.block)]
        self.blocks = cut(self.part.rows, blocks)
        self.takes, self.sends = open_at(table, cuts[index]), open_at(table, cuts[index + 1])
        self.recompute = plan.train.recompute
        self.autocast = plan.train.precision == "bf16-autocast"
        self.layers = nn.ModuleDict({row.name: layers[row.name] for row in self.part.rows})
        first = self.part.rows[0]
        self._overwrites = first.kind == "activation" and bool(
            getattr(self.layers[first.name], "inplace", False)
        )
        self.tiles: tuple[Tile, ...] | None = None
        self.channels_last = False
        self._calls = 0

    def run(
        self, x_BCHW: Tensor, skips: dict[str, Tensor], tile: Tile | None = None, last: bool = True
    ) -> Tensor:
        """The stage's map for one micro-batch; `skips` are brought up to date.

        `last` : whether this is the last micro-batch, for `recompute="except_last"`.
        """
        mode = self.recompute
        if mode == "except_last":
            mode = "none" if last else "stage"
        with torch.autocast(x_BCHW.device.type, torch.bfloat16, enabled=self.autocast):
            if mode == "none":
                # What came in belongs to others, and may be a leaf of the graph.
                x = x_BCHW.clone() if self._overwrites else x_BCHW
                x = run_layers(self.part.rows, self.layers, x, skips, tile)
            else:
                x = x_BCHW
                for part in self.blocks if mode == "block" else (self.part,):
                    x = run_segment(part, self.layers, x, skips, tile)
        if self.last and tile is not None:
            x = x[(..., *tile.out.slices)]
        return x

    # Between ranks -----------------------------------------------------------------------------

    def rewind(self, tiles: tuple[Tile, ...] | None) -> None:
        """Begin a pass: the next call of `forward` is micro-batch 0."""
        self._calls, self.tiles = 0, tiles

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The next micro-batch, as torch's schedules call it: in order, once each."""
        number = self._calls
        self._calls += 1
        if self.index:
            x, *taken = (_Arrive.apply(t, self.channels_last) for t in inputs)
        else:
            (x,), taken = inputs, []
        skips = dict(zip(self.takes, taken, strict=True))
        tile = None if self.tiles is None else self.tiles[number]
        x = self.run(x, skips, tile, number == self.micro_batches - 1)
        if self.last:
            return x
        dtype = torch.bfloat16 if self.autocast else x.dtype
        return tuple(
            _wire(t.to(dtype), self.channels_last) for t in (x, *(skips[n] for n in self.sends))
        )


def _wire(x_BCHW: Tensor, channels_last: bool) -> Tensor:
    """As it travels; channels-last maps go as (batch, height, width, channels), without a copy."""
    return (x_BCHW.permute(0, 2, 3, 1) if channels_last else x_BCHW).contiguous()


class _Arrive(torch.autograd.Function):
    """Off the wire; the gradient goes onto it contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, channels_last: bool) -> Tensor:
        ctx.channels_last = channels_last
        return x.permute(0, 3, 1, 2) if channels_last else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _wire(gradients[0], ctx.channels_last), None


def wire_tensors(
    plan: Plan, cut_index: int, dtype: torch.dtype, *, tile: Tile | None, channels_last: bool
) -> tuple[Tensor, ...]:
    """What crosses cut `cut_index` for one micro-batch, as tensors without data (device "meta").

    Cut 0 is the input, cut `num_stages` the output; in the decoder of a `tile` maps are cropped.
    """
    _, channels, height, width = plan.shape_BCHW
    stride = plan.spec.stride
    height, width = -(-height // stride) * stride, -(-width // stride) * stride
    shape = (plan.micro_batch, channels, height, width)
    rows = layer_table(plan.spec, shape, tile=tile)
    end = plan.cuts[cut_index]
    if end == 0:
        return (torch.empty(shape, dtype=dtype, device="meta"),)
    if end == len(rows):
        size = rows[-1].out_shape[-2:] if tile is None else tile.out.shape
        return (
            torch.empty((plan.micro_batch, plan.spec.classes, *size), dtype=dtype, device="meta"),
        )
    by_name = {row.name: row.out_shape for row in rows}
    shapes = [rows[end - 1].out_shape, *(by_name[name] for name in open_at(rows, end))]
    if plan.train.precision == "bf16-autocast":
        dtype = torch.bfloat16
    return tuple(
        torch.empty(
            (b, h, w, c) if channels_last else (b, c, h, w),
            dtype=dtype,
            device="meta",
            requires_grad=True,
        )
        for b, c, h, w in shapes
    )
