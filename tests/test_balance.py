"""Balances: the exact one against brute force, fairscale's against fairscale itself."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from fairscale.nn.pipe.balance import blockpartition

from bigunet.balance import balance, block_partition
from bigunet.errors import PlanError


def heaviest(weights: list[float], cuts: tuple[int, ...]) -> float:
    return float(np.diff(np.concatenate(([0], np.cumsum(weights)))[list(cuts)]).max())


@pytest.mark.parametrize("part", range(4))
def test_exact_balance_equals_brute_force(part: int) -> None:
    rng = np.random.default_rng(part)
    for i in range(60):
        num = int(rng.integers(1, 12))
        stages = int(rng.integers(1, min(num, 5) + 1))
        weights = (rng.uniform(0, 1, num) ** 3 if i % 2 else rng.integers(0, 4, num)).tolist()
        best = min(
            heaviest(weights, (0, *cuts, num)) for cuts in combinations(range(1, num), stages - 1)
        )
        cuts = balance(weights, stages)
        assert len(cuts) == stages + 1
        assert all(a < b for a, b in pairwise(cuts))
        assert heaviest(weights, cuts) == pytest.approx(best, rel=1e-9)


def test_block_partition_equals_fairscale() -> None:
    rng = np.random.default_rng(0)
    refused = 0
    for i in range(1500):
        num = int(rng.integers(1, 80))
        stages = int(rng.integers(1, max(1, num // 4) + 1))
        times = (rng.uniform(0, 1, num) ** 4 if i % 3 else rng.integers(1, 5, num)).tolist()
        try:
            ours = block_partition(times, stages)
        except PlanError:
            refused += 1
            continue
        theirs = [len(part) for part in blockpartition.solve(times, stages)]
        assert np.diff(ours).tolist() == theirs
    assert refused < 20


def test_an_empty_stage_is_refused() -> None:
    """Nearly as many stages as layers: fairscale leaves some of them empty here."""
    with pytest.raises(PlanError, match="every stage a layer"):
        block_partition([2, 3, 3, 2, 3, 3], 5)
    assert 0 in [len(part) for part in blockpartition.solve([2, 3, 3, 2, 3, 3], 5)]


def test_block_partition_may_miss_the_best() -> None:
    """The heuristic stops within the largest layer's time of balance."""
    times = [1.0, 1.0, 1.0, 1.0, 4.0, 1.0]
    assert heaviest(times, balance(times, 2)) < heaviest(times, (0, 3, 6))
    assert block_partition(times, 2) != balance(times, 2)


@pytest.mark.parametrize("stages", [0, 4])
def test_stages_must_have_layers(stages: int) -> None:
    for way in (balance, block_partition):
        with pytest.raises(PlanError, match="1 to 3"):
            way([1.0, 2.0, 3.0], stages)
