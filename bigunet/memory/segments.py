"""Which layers are recomputed together: cuts of the layer table and what crosses them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from bigunet.errors import PlanError, fail
from bigunet.layers import LayerRow
from bigunet.spec import Recompute

__all__ = ["Segment", "check_stages", "cut", "segments"]


class Segment(NamedTuple):
    """Consecutive layers. `takes` names the skips that come in, `makes` those that go out."""

    rows: tuple[LayerRow, ...]
    takes: tuple[str, ...]
    makes: tuple[str, ...]


def check_stages(stages: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """`stages`, layers in each stage, as a tuple.

    Raises
    ------
    PlanError : unless all are at least 1 and they add up to `num_layers`.
    """
    sizes = tuple(stages)
    bad = any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in sizes)
    if bad or sum(sizes) != num_layers:
        fail(
            PlanError,
            rule=f"stages hold at least one layer each and {num_layers} together",
            got=sizes if bad else f"{sizes}, together {sum(sizes)}",
            remedy="Change the number of layers of one stage.",
        )
    return sizes


def cut(rows: Sequence[LayerRow], sizes: Sequence[int]) -> tuple[Segment, ...]:
    """`rows` cut into consecutive parts of these sizes."""
    ends = list(accumulate(sizes))
    parts = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        part = tuple(rows[start:end])
        made = [row.name for row in part if row.kind == "skip"]
        used = [row.source for row in part if row.source is not None]
        parts.append(
            Segment(
                part,
                tuple(name for name in used if name not in made),
                tuple(name for name in made if name not in used),
            )
        )
    return tuple(parts)


def segments(
    rows: Sequence[LayerRow], mode: Recompute, stages: Sequence[int] | None = None
) -> tuple[Segment, ...]:
    """The parts that are recomputed on their own: each block, or each stage.

    One part, the whole network, for the stage modes without `stages`.

    Raises
    ------
    PlanError : see `check_stages`.
    """
    if mode == "block":
        return cut(rows, [len(list(part)) for _, part in groupby(rows, key=lambda r: r.block)])
    return cut(rows, (len(rows),) if stages is None else check_stages(stages, len(rows)))
