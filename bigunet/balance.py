"""Other ways to cut, to compare with: balanced by time, memory or parameters, and fairscale's.

None of them knows what crosses a cut; fairscale's does not even reach the best balance.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

import numpy as np

from bigunet.errors import PlanError, fail

__all__ = ["balance", "block_partition"]


def _check(num_rows: int, stages: int) -> None:
    if not 1 <= stages <= num_rows:
        fail(
            PlanError,
            rule=f"the number of stages is 1 to {num_rows}, the layers",
            got=stages,
            remedy="Ask for fewer stages.",
        )


def balance(weights: Sequence[float], stages: int) -> tuple[int, ...]:
    """Cuts whose heaviest stage is as light as can be: exact, by bisection.

    `weights` may be seconds, bytes or parameters, one of each row. Cuts are row numbers, from 0
    to the number of rows.

    Raises
    ------
    PlanError : for more stages than rows or fewer than 1.
    """
    _check(len(weights), stages)
    before = np.concatenate(([0.0], np.cumsum(np.asarray(weights, dtype=np.float64))))
    low, high = float(max(weights)), float(before[-1])
    best = _filled(before, stages, high)
    # 60 halvings bring any two sums of doubles as near as doubles can be.
    for _ in range(60):
        middle = (low + high) / 2
        cuts = _filled(before, stages, middle)
        if cuts is None:
            low = middle
        else:
            best = cuts
            high = float(np.diff(before[list(cuts)]).max())
    assert best is not None
    return best


def _filled(before: np.ndarray, stages: int, limit: float) -> tuple[int, ...] | None:
    num_rows, cuts = len(before) - 1, [0]
    for left in reversed(range(stages)):
        # Sums and differences of them round differently.
        reach = before[cuts[-1]] + limit * (1 + 1e-12)
        stop = min(int(np.searchsorted(before, reach, "right")) - 1, num_rows - left)
        cuts.append(max(stop, cuts[-1] + 1))
    return tuple(cuts) if cuts[-1] == num_rows else None


def block_partition(seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """The cuts that `balance_by_time` of torchgpipe and fairscale makes from layer times.

    Bárány and Grinberg, "Block partitions of sequences" (arXiv 1308.2452): starting from stages
    of equally many layers, a layer at a time moves from the heaviest stage towards the lightest
    one, until they differ by no more than the largest layer. That is a bound, not the optimum.
    Ties and the order of additions are those of fairscale 0.4.13, so that results agree.

    Raises
    ------
    PlanError : for more stages than layers or fewer than 1, and where the method leaves a stage
        without layers (it may with as many stages as there are layers of any length).
    """
    num_rows = len(seconds)
    _check(num_rows, stages)
    least, span = min(seconds), max(seconds) - min(seconds)
    scaled = [(s - least) / span if span else 0.0 for s in seconds]
    ends = [num_rows // stages * (i + 1) for i in range(stages - 1)] + [num_rows]
    starts = [0, *ends[:-1]]
    sums = [sum(scaled[a:b]) for a, b in zip(starts, ends, strict=True)]

    def move(border: int, by: int) -> None:
        """Shift the border behind stage `border`; both stages at it are added up anew."""
        ends[border] += by
        for changed in (border, border + 1):
            low = ends[changed - 1] if changed else 0
            sums[changed] = sum(scaled[low : ends[changed]])

    def useless() -> NoReturn:
        fail(
            PlanError,
            rule="block partition leaves every stage a layer",
            got=f"stages that end at {ends}",
            remedy="Ask for fewer stages, or balance in another way.",
        )

    # Where layers of no time let a stage run empty, the moves need not come to an end.
    for _ in range(4 * stages * num_rows + 4):
        heaviest = max(range(stages), key=lambda i: (sums[i], i))
        most = sums[heaviest]
        for _ in range(4 * stages * num_rows + 4):
            lightest = min(range(stages), key=lambda i: (sums[i], i))
            if most <= sums[lightest] + 1:
                if any(b <= a for a, b in pairwise([0, *ends])):
                    useless()
                return (0, *ends)
            if heaviest < lightest:
                giver = lightest - 1
                move(giver, -1)
            else:
                giver = lightest + 1
                move(lightest, 1)
            if giver == heaviest:
                break
        else:
            useless()
    useless()
