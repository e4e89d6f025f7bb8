"""Real CPU steps against the prediction."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bigunet.errors import SpecError
from bigunet.measure import compare_memory, measured_peak
from bigunet.memory import memory
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import inner_tile

SMALL = UNetSpec(levels=3, convs=2, channels=16)
TINY = SMALL.replace(channels=8)
KINDS = {
    "plain": (SMALL, (2, 128), TrainSpec()),
    "tiny": (TINY, (1, 128), TrainSpec()),
    "tiny, large image": (TINY, (1, 512), TrainSpec()),
    "large": (UNetSpec(channels=32), (1, 128), TrainSpec(optimiser="adam")),
    "batch norm": (SMALL.replace(norm="batch"), (2, 128), TrainSpec(optimiser="adam")),
    "group norm": (SMALL.replace(norm="group", groups=4, up="nearest"), (2, 128), TrainSpec()),
    "instance norm": (SMALL.replace(norm="instance", up="bilinear"), (2, 128), TrainSpec()),
    "recompute": (SMALL.replace(up="bilinear"), (2, 128), TrainSpec(recompute="block")),
    "recompute all": (SMALL, (1, 128), TrainSpec(recompute="stage", optimiser="momentum")),
    "reflect": (SMALL.replace(padding_mode="reflect"), (1, 128), TrainSpec(optimiser="sgd")),
    "torchgpipe": (UNetSpec.torchgpipe(1, 8), (2, 128), TrainSpec(optimiser="sgd")),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Each further thread has work space of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_measured_step_is_within_a_tenth_of_the_prediction(kind: str, precision: str) -> None:
    """The prediction that users get, not the one that follows fake tensors."""
    spec, (batch, side), train = KINDS[kind]
    train = train.replace(precision=precision)
    shape = (batch, 3, side, side)
    predicted = int(memory(spec, shape, train, workspace=True).peak[0])
    assert predicted == pytest.approx(measured_peak(spec, shape, train), rel=0.1)


def test_predicted_traced_and_measured_stand_in_one_table() -> None:
    found = compare_memory(SMALL, (2, 3, 96, 96), TrainSpec())
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
