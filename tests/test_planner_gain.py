"""What planning gains in the simulator: the benchmark's own figures, held to their promises."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "planner_gain.py"


@pytest.fixture(scope="module")
def gain() -> ModuleType:
    spec = importlib.util.spec_from_file_location("planner_gain", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_planned_cuts_beat_fairscale_s_balance(gain: ModuleType) -> None:
    """Eight U-Nets on 3, 4 and 6 GPUs of a Summit node, GPipe."""
    values = list(gain.gains("gpipe").values())
    assert len(values) == 24
    assert min(values) >= 1 - 1e-9
    assert gain.geometric_mean(values) >= 1.05


def test_planned_cuts_never_lose_with_1f1b(gain: ModuleType) -> None:
    values = list(gain.gains("1f1b").values())
    assert min(values) >= 1 - 1e-9
    assert gain.geometric_mean(values) >= 1.01


def test_folding_keeps_skips_off_the_links(gain: ModuleType) -> None:
    straight, folded, over, none = gain.folded()
    assert none == 0
    assert over > 1e9
    assert folded < straight
