"""Run a network with its activations recomputed in the backward pass, segment by segment.

A segment (a block, a stage, the whole net; see `bigunet.memory.segments`) keeps its inputs, the
running map and the skips it takes, and nothing else; its backward pass runs it again first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigunet.layers import LayerRow
from bigunet.memory.segments import Segment, segments
from bigunet.model import UNet, pad_to_stride, run_layers
from bigunet.spec import Recompute
from bigunet.tiles import Tile

__all__ = ["run_recomputed", "run_segment"]


def run_recomputed(
    model: UNet,
    x_BCHW: Tensor,
    tile: Tile | None = None,
    mode: Recompute = "none",
    *,
    stages: Sequence[int] | None = None,
    last: bool = True,
) -> Tensor:
    """Logits as `model(x)` or `model.forward_tile(x, tile)` gives them, bit for bit.

    Parameters
    ----------
    mode : what is recomputed: "none", each "block", each "stage", or each stage "except_last",
        which recomputes unless this is the `last` micro-batch of a step.
    stages : layers in each stage, in order; the whole network is one stage by default.

    Raises
    ------
    PlanError : for stages that do not add up to the network's layers.
    ShapeError : as the model does.
    """
    if mode == "except_last":
        mode = "none" if last else "stage"
    if mode == "none":
        return model(x_BCHW) if tile is None else model.forward_tile(x_BCHW, tile)
    parts = segments(model.rows, mode, stages)
    height, width = x_BCHW.shape[-2:]
    x = pad_to_stride(x_BCHW, model.spec.stride) if tile is None else x_BCHW
    skips: dict[str, Tensor] = {}
    for part in parts:
        x = run_segment(part, model.layers, x, skips, tile)
    return x[..., :height, :width] if tile is None else x[(..., *tile.out.slices)]


def run_segment(
    part: Segment,
    modules: Mapping[str, nn.Module] | nn.ModuleDict,
    x_BCHW: Tensor,
    skips: dict[str, Tensor],
    tile: Tile | None = None,
) -> Tensor:
    """One segment under checkpointing; takes its skips from `skips` and adds those it makes."""
    taken = [skips.pop(name) for name in part.takes]
    x, *made = checkpoint(
        _runner(part, modules, tile), x_BCHW, *taken, use_reentrant=False, preserve_rng_state=True
    )
    skips.update(zip(part.makes, made, strict=True))
    return x


def _runner(
    part: Segment, modules: Mapping[str, nn.Module] | nn.ModuleDict, tile: Tile | None
) -> Callable[..., tuple[Tensor, ...]]:
    rows: Sequence[LayerRow] = part.rows

    def run(x_BCHW: Tensor, *taken: Tensor) -> tuple[Tensor, ...]:
        skips = dict(zip(part.takes, taken, strict=True))
        if rows[0].kind == "activation" and getattr(modules[rows[0].name], "inplace", False):
            # The segment's input is kept for the second run and must not be overwritten.
            x_BCHW = x_BCHW.clone()
        x = run_layers(rows, modules, x_BCHW, skips, tile)
        return (x, *(skips[name] for name in part.makes))

    return run
