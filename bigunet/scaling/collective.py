"""Sums over ranks: how many bytes go over which link, and how long that takes.

Three ways to sum a message of S bytes over n ranks, in all of which 2 (n - 1) S bytes are sent:

ring : 2 (n - 1) steps of S / n bytes, each rank to the next (Patarasuk and Yuan 2009,
    doi 10.1016/j.jpdc.2008.09.002); the slowest link of the ring sets the pace.
tree : up and down a binary tree of the nodes and a chain in each node, S bytes over every edge,
    in pieces that follow each other (NCCL's double tree, developer.nvidia.com/blog/
    massively-scale-deep-learning-training-nccl-2-4, 2019).
hierarchical : a ring in each node scatters the sum, as many rings as a node has ranks sum the
    parts over the nodes, and a ring in each node gathers them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from bigunet.machines import Link, Machine

__all__ = ["LINKS", "Algorithm", "Members", "Sum", "members_of", "sum_over"]

LINKS = ("inside", "across", "network")
Algorithm = Literal["auto", "ring", "tree", "hierarchical"]


@dataclass(frozen=True, slots=True)
class Members:
    """Ranks that sum something, `per_node` of them on each of `num_nodes` nodes but the last.

    `ring` counts the links of the ring by `LINKS`, `node_ring` and `chain` those of the ring and
    of the chain within one full node; `even` tells whether the last node is full as well.
    """

    num: int
    num_nodes: int
    per_node: int
    ring: tuple[int, int, int]
    node_ring: tuple[int, int]
    chain: tuple[int, int]
    even: bool


@lru_cache(maxsize=8192)
def members_of(
    num: int, num_devices: int, per_socket: int, step: int = 1, first: int = 0
) -> Members:
    """Ranks `first`, `first + step`, ... of nodes of `num_devices`, in groups of `per_socket`."""
    ids = first + step * np.arange(num)
    node, socket = ids // num_devices, ids % num_devices // per_socket

    def count(here: np.ndarray, there: np.ndarray) -> tuple[int, int, int]:
        remote = node[here] != node[there]
        across = ~remote & (socket[here] != socket[there])
        return int((~remote & ~across).sum()), int(across.sum()), int(remote.sum())

    all_of = np.arange(num)
    on_node = np.bincount(node - node.min())
    on_node = on_node[on_node > 0]
    most = int(on_node.max())
    start = int(np.flatnonzero(np.bincount(node)[node] == most)[0])
    one = np.arange(start, start + most)
    ring = count(all_of, np.roll(all_of, -1)) if num > 1 else (0, 0, 0)
    node_ring = count(one, np.roll(one, -1))[:2] if most > 1 else (0, 0)
    chain = count(one[:-1], one[1:])[:2]
    even = bool((on_node == most).all())
    return Members(num, len(on_node), most, ring, node_ring, chain, even)


@dataclass(frozen=True, slots=True)
class Sum:
    """Seconds of one message, the bytes that all ranks together send by `LINKS`, and the way."""

    seconds: float
    link_bytes: tuple[float, float, float]
    algorithm: str


_NOTHING = Sum(0.0, (0.0, 0.0, 0.0), "none")


def _seconds(link: Link, num_bytes: float, rate: float = math.inf) -> float:
    return link.latency_seconds + num_bytes / min(link.bytes_per_second, rate)


def sum_over(
    members: Members,
    machine: Machine,
    num_bytes: float,
    algorithm: Algorithm = "auto",
    sharing: int = 1,
) -> Sum:
    """One message summed over the members; "auto" takes the fastest way for its size.

    `sharing` sums of this kind run at once on the same nodes and share what a node sends out.
    """
    if members.num == 1 or num_bytes == 0:
        return _NOTHING
    if machine.all_reduce is not None and algorithm in ("auto", "ring"):
        # Timed on this machine, the copies and additions of a sum included, and read as a ring.
        step = _seconds(machine.all_reduce, num_bytes / members.num)
        ring = _ring(members, machine, num_bytes, sharing)
        return replace(ring, seconds=2 * (members.num - 1) * step)
    ways = [
        found
        for name, way in (("ring", _ring), ("tree", _tree), ("hierarchical", _hierarchical))
        if algorithm in ("auto", name)
        and (found := way(members, machine, num_bytes, sharing)) is not None
    ]
    # Uneven nodes have no hierarchical way.
    return min(ways, key=lambda way: way.seconds) if ways else sum_over(
        members, machine, num_bytes, "auto", sharing
    )  # fmt: skip


def _links(machine: Machine, counts: Iterable[int], lanes: int) -> list[tuple[Link, float]]:
    """The kinds of links in use, each with the rate of one of `lanes` flows out of a node."""
    out = machine.injection_bytes_per_second / lanes
    kinds = ((machine.inside, math.inf), (machine.across, math.inf), (machine.network, out))
    return [kind for kind, count in zip(kinds, counts, strict=False) if count]


def _ring(members: Members, machine: Machine, size: float, sharing: int) -> Sum:
    n = members.num
    links = _links(machine, members.ring, sharing)
    pace = max(_seconds(link, size / n, rate) for link, rate in links)
    each = 2 * (n - 1) / n * size
    a, b, c = (each * count for count in members.ring)
    return Sum(2 * (n - 1) * pace, (a, b, c), "ring")


def _tree(members: Members, machine: Machine, size: float, sharing: int) -> Sum:
    inside = _links(machine, members.chain, 1)
    hops = 0.0
    rates = [link.bytes_per_second for link, _ in inside]
    if inside:
        hops += (members.per_node - 1) * max(link.latency_seconds for link, _ in inside)
    if members.num_nodes > 1:
        hops += math.ceil(math.log2(members.num_nodes)) * machine.network.latency_seconds
        # Two trees, each of half the bytes: one rank is a leaf of one of them.
        network = machine.network.bytes_per_second
        rates.append(min(network, machine.injection_bytes_per_second / sharing))
    # Edges of the last, smaller node are counted by the whole.
    edges = members.num - members.num_nodes
    share = members.chain[0] / max(1, sum(members.chain))
    sent = (2 * size * edges * share, 2 * size * edges * (1 - share))
    return Sum(
        2 * (hops + size / min(rates)), (*sent, 2 * size * (members.num_nodes - 1)), "tree"
    )  # fmt: skip


def _hierarchical(members: Members, machine: Machine, size: float, sharing: int) -> Sum | None:
    g, nodes = members.per_node, members.num_nodes
    if not members.even or g == 1 or nodes == 1:
        return None
    links = _links(machine, members.node_ring, 1)
    pace = max(_seconds(link, size / g, rate) for link, rate in links)
    lane = machine.injection_bytes_per_second / (g * sharing)
    between = 2 * (nodes - 1) * _seconds(machine.network, size / g / nodes, lane)
    each = nodes * 2 * (g - 1) / g * size
    a, b = (each * count for count in members.node_ring)
    return Sum(
        2 * (g - 1) * pace + between, (a, b, 2 * (nodes - 1) * size), "hierarchical"
    )  # fmt: skip
