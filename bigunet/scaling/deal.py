"""How many tiles of each kind every rank gets, by the rule of sample-parallel training.

`bigunet.sample_parallel.deal_tiles` gives each tile, those with the most pixels to read first, to
the rank with the least to read so far. Ranks that have got the same are kept as one group here,
so that thousands of ranks and a million tiles take no longer than a few.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["Shares", "deal_kinds"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Shares:
    """Groups of ranks: `ranks[g]` of them have `tiles[g, k]` tiles of kind k each."""

    ranks: Ints
    tiles: Ints

    @property
    def num_ranks(self) -> int:
        return int(self.ranks.sum())

    @property
    def num_idle(self) -> int:
        return int(self.ranks[self.tiles.sum(axis=1) == 0].sum())


@dataclass(slots=True)
class _Group:
    load: int
    size: int
    tiles: list[int]


def deal_kinds(
    areas: Sequence[int],
    counts: Sequence[int],
    num_ranks: int,
    order: Callable[[], Sequence[int]],
) -> Shares:
    """The shares of `num_ranks` ranks.

    Parameters
    ----------
    areas, counts : pixels to read, and number of tiles, of each kind.
    order : gives the kind of every tile in turn; asked for only where kinds of one area take
        turns, and then the tiles are dealt one by one.
    """
    if len(set(areas)) < len(areas):
        return _one_by_one(areas, order(), num_ranks)
    return _by_kind(tuple(areas), tuple(counts), num_ranks)


@lru_cache(maxsize=8192)
def _by_kind(areas: tuple[int, ...], counts: tuple[int, ...], num_ranks: int) -> Shares:
    groups = [_Group(0, num_ranks, [0] * len(areas))]
    for kind in sorted(range(len(areas)), key=lambda k: -areas[k]):
        _deal(groups, kind, areas[kind], counts[kind], num_ranks)
    return Shares(
        np.array([g.size for g in groups], dtype=np.int64),
        np.array([g.tiles for g in groups], dtype=np.int64),
    )


def _deal(groups: list[_Group], kind: int, area: int, left: int, num_ranks: int) -> None:
    """Deal `left` tiles of one area; groups stay in the order of their ranks."""
    while left:
        loads = [g.load for g in groups]
        least = min(loads)
        if left >= num_ranks and max(loads) < least + area:
            # Nobody gets a second tile before everybody has got one: whole rounds at once.
            rounds, left = divmod(left, num_ranks)
            for group in groups:
                group.load += rounds * area
                group.tiles[kind] += rounds
            continue
        # Of equal loads the lowest rank takes first.
        at = loads.index(least)
        group = groups[at]
        if left < group.size:
            rest = _Group(group.load, group.size - left, list(group.tiles))
            group.size = left
            groups.insert(at + 1, rest)
        group.load += area
        group.tiles[kind] += 1
        left -= group.size


def _one_by_one(areas: Sequence[int], kinds: Sequence[int], num_ranks: int) -> Shares:
    heap = [(0, rank) for rank in range(num_ranks)]
    tiles = [[0] * len(areas) for _ in range(num_ranks)]
    for kind in sorted(kinds, key=lambda k: -areas[k]):
        load, rank = heap[0]
        tiles[rank][kind] += 1
        heapq.heapreplace(heap, (load + areas[kind], rank))
    alike = Counter(map(tuple, tiles))
    return Shares(
        np.array(list(alike.values()), dtype=np.int64), np.array(list(alike), dtype=np.int64)
    )
