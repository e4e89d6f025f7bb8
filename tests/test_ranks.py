"""One rank needs no communication; sums over several are tested where they are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_work import everyone

from bigunet.errors import LaunchError
from bigunet.launch import launch
from bigunet.ranks import Ranks, current, init


def test_one_rank() -> None:
    ranks = Ranks()
    tensor = torch.ones(3)
    assert ranks.first
    assert ranks.sum_(tensor) is tensor
    ranks.sum_all_([tensor])
    assert tensor.tolist() == [1, 1, 1]
    assert ranks.any(True)
    assert not ranks.any(False)
    assert ranks.share("x") == "x"
    ranks.wait()
    with init() as inside:
        assert (inside.rank, inside.size) == (0, 1)
    assert current().size == 1


def test_three_ranks() -> None:
    results: list[Any] = launch(
        everyone, ("communicate",), ranks=3, threads_per_rank=1, progress=False
    )
    for rank, result in enumerate(results):
        assert result == {
            "rank": rank,
            "size": 3,
            "sum": [3.0, 6.0],
            "integers": [3],
            "all": [[6.0] * 5, [30.0], [600.0] * 3],
            "any": (True, False),
            "shared": {"from": 0},
        }


def test_ranks_that_cannot_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(LaunchError, match="2 ranks join one process group"), init():
        pass
