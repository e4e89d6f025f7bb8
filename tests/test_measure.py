"""Real CPU steps against the prediction."""

from __future__ import annotations

import pytest

from bigunet.errors import SpecError
from bigunet.measure import compare_memory, measured_peak
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import inner_tile

SMALL = UNetSpec(levels=3, convs=2, channels=16)
CASES = {
    "adamw": (SMALL, 2, TrainSpec()),
    "batch norm": (SMALL.replace(norm="batch"), 2, TrainSpec(optimiser="adam")),
    "recompute": (SMALL.replace(up="bilinear"), 2, TrainSpec(recompute="block")),
    "recompute all": (SMALL, 1, TrainSpec(recompute="stage", optimiser="momentum")),
    "autocast": (SMALL, 2, TrainSpec(precision="bf16-autocast")),
    "reflect": (SMALL.replace(padding_mode="reflect"), 1, TrainSpec(optimiser="sgd")),
    "torchgpipe": (UNetSpec.torchgpipe(1, 8), 2, TrainSpec(optimiser="sgd")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_measured_step_is_within_a_tenth_of_the_prediction(name: str) -> None:
    spec, batch, train = CASES[name]
    found = compare_memory(spec, (batch, 3, 96, 96), train)
    assert found.source.values.tolist() == ["traced", "measured"]
    traced, measured = found.ratio.values
    assert abs(traced - 1) < 0.01
    assert abs(measured - 1) < 0.1


def test_a_measured_tile_is_within_a_tenth() -> None:
    tile = inner_tile(64, SMALL)
    found = compare_memory(SMALL, (1, 3, *tile.read.shape), TrainSpec(), tile=tile)
    assert abs(found.ratio.sel(source="measured") - 1) < 0.1


def test_only_what_is_there_is_measured() -> None:
    with pytest.raises(SpecError, match="measured on cpu"):
        measured_peak(SMALL, (1, 3, 32, 32), TrainSpec(), device="tpu")
