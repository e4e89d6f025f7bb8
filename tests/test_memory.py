"""The predicted table and timeline, without torch."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest

from bigunet.errors import PlanError, ShapeError, SpecError
from bigunet.layers import layer_table
from bigunet.memory import CAUSES, memory, memory_table, peak_bytes, published_memory
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import inner_tile

SPEC = UNetSpec(levels=3, convs=2, channels=8, in_channels=3)
SHAPE = (4, 3, 64, 64)
SGD = TrainSpec(optimiser="sgd", weight_decay=0.0)


def test_the_published_memory_of_torchgpipes_unets() -> None:
    """Every row within 10 %, and the parameters in the digits given; nothing is fitted to them."""
    rows = published_memory()
    assert [row.experiment for row in rows] == [
        "baseline",
        "pipeline-1",
        "pipeline-2",
        "pipeline-4",
        "pipeline-8",
    ]
    for row in rows:
        assert abs(row.ratio - 1) < 0.1, row
        digits = 6 if row.parameters_millions < 1000 else -1
        assert round(row.predicted_millions, digits) == row.parameters_millions


@pytest.mark.alone
@pytest.mark.parametrize("recompute", ["none", "block", "stage"])
def test_one_prediction_takes_under_20_ms(recompute: str) -> None:
    spec, train = UNetSpec.torchgpipe(48, 160), SGD.replace(recompute=recompute)
    shape = (32, 3, 192, 192)
    seconds = []
    for _ in range(9):
        layer_table.cache_clear()
        start = time.process_time()
        memory(spec, shape, train)
        seconds.append(time.process_time() - start)
    assert len(layer_table(spec, shape)) == 2133
    assert statistics.median(seconds) < 0.020


def test_the_timeline_holds_together() -> None:
    for train in (TrainSpec(), TrainSpec(recompute="block", precision="bf16-autocast")):
        table = memory(SPEC, SHAPE, train)
        total = table.live.sum("cause").values
        assert int(table.peak[0]) == total.max() == total[int(table.peak_moment[0])]
        assert int(table.at_peak[0].sum()) == int(table.peak[0])
        assert (table.live.values >= 0).all()
        # A step starts without gradients and ends with them; all else of it is gone again.
        first, last = table.live[0], table.live[-1]
        for cause in ("parameters", "optimiser", "input", "buffers"):
            assert int(first.sel(cause=cause)) == int(last.sel(cause=cause))
        gradients = int(table.held.sel(cause="gradients").sum())
        assert int(last.sel(cause="gradients")) == gradients
        assert int(last.sel(cause=["activations", "skips", "casts"]).sum()) == 0


def test_phases_come_in_order_and_recomputation_only_where_asked() -> None:
    names = ["forward", "loss", "recompute", "backward", "optimiser"]
    plain = memory(SPEC, SHAPE, TrainSpec())
    assert plain.phase.values.tolist() == names
    assert 2 not in plain.moment_phase.values
    assert (np.diff(plain.moment_phase.values) >= 0).all()
    assert 2 in memory(SPEC, SHAPE, TrainSpec(recompute="block")).moment_phase.values


def test_each_remedy_lowers_the_peak() -> None:
    """Of a net whose activations dominate, as they do for large images."""
    shape = (1, 3, 512, 512)
    plain = peak_bytes(SPEC, shape, TrainSpec())[0]
    for train in (
        TrainSpec(recompute="block"),
        TrainSpec(precision="bf16"),
        TrainSpec(precision="bf16-autocast"),
        TrainSpec(optimiser="sgd"),
    ):
        assert peak_bytes(SPEC, shape, train)[0] < plain
    tile, full = inner_tile(256, SPEC), inner_tile(256, SPEC, cropped=False)
    assert tile.read == full.read
    sides = (1, 3, *tile.read.shape)
    cropped = peak_bytes(SPEC, sides, TrainSpec(), tile=tile)[0]
    assert cropped < peak_bytes(SPEC, sides, TrainSpec(), tile=full)[0] < plain


def test_stages_share_out_what_stays() -> None:
    layers = len(layer_table(SPEC, SHAPE))
    whole = memory(SPEC, SHAPE, TrainSpec())
    staged = memory(SPEC, SHAPE, TrainSpec(), stages=(9, 5, layers - 14), chunks=4)
    assert staged.peak.sizes == {"stage": 3}
    assert staged.layer_stage.values.tolist() == [0] * 9 + [1] * 5 + [2] * (layers - 14)
    for cause in ("parameters", "gradients", "optimiser", "input"):
        ours, theirs = staged.held.sel(cause=cause).sum(), whole.held.sel(cause=cause).sum()
        assert int(ours) == int(theirs)


def test_a_micro_batch_in_flight_costs_its_stages_input_or_all_that_is_kept() -> None:
    rows = layer_table(SPEC, (1, *SHAPE[1:]))
    start = next(i for i, row in enumerate(rows) if row.name == "mid_conv0")
    stages = (start, len(rows) - start)
    for recompute in ("stage", "none"):
        train = SGD.replace(recompute=recompute)
        peaks = [
            peak_bytes(SPEC, (8, *SHAPE[1:]), train, stages=stages, chunks=8, in_flight=n)[1]
            for n in (4, 5, 6)
        ]
        steps = np.diff(peaks)
        assert steps[0] == steps[1]
        taken = 4 * sum(
            np.prod(row.out_shape) for row in rows[:start] if row.kind == "skip"
        ) + 4 * np.prod(rows[start - 1].out_shape)
        if recompute == "stage":
            # The last stage keeps its results, too, until the loss of all is known.
            assert steps[0] == taken + 4 * np.prod(rows[-1].out_shape)
        else:
            assert steps[0] > taken


def test_cuda_rounds_every_storage_up_to_512_bytes() -> None:
    table = memory(SPEC, SHAPE, TrainSpec(), device="V100-16GB")
    assert not (table.held.values % 512).any()
    assert table.attrs["capacity_bytes"] == 16 * 2**30
    plain = memory_table(table, layers=True)
    assert plain["used_percent"] == 100 * int(table.peak[0]) / 2**34
    assert len(plain["layers"]) == table.sizes["layer"]
    assert list(plain["stages"][0]["causes"]) == list(CAUSES)


@pytest.mark.parametrize(
    ("shape", "how", "error", "text"),
    [
        ((1, 3, 0, 64), {}, ShapeError, "integers of at least 1"),
        ((1, 3, 64, -64), {}, ShapeError, "integers of at least 1"),
        ((1, 3, 64), {}, ShapeError, "four integers"),
        ((1, 3, 2, 64), {}, ShapeError, "stride 4"),
        ((1, 5, 64, 64), {}, ShapeError, "3 bands"),
        ((2**20, 3, 2**20, 2**20), {}, ShapeError, "64 bits"),
        (SHAPE, {"chunks": 5}, PlanError, "1 to 4 micro-batches"),
        (SHAPE, {"chunks": 0}, PlanError, "1 to 4 micro-batches"),
        (SHAPE, {"chunks": 2, "in_flight": 3}, PlanError, "in flight"),
        (SHAPE, {"stages": (3, 4)}, PlanError, "together 7"),
        (SHAPE, {"device": "abacus"}, SpecError, "abacus"),
    ],
)
def test_bad_input_is_refused_with_rule_and_value(
    shape: tuple[int, ...], how: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        memory(SPEC, shape, TrainSpec(), **how)  # type: ignore[arg-type]


def test_an_unknown_optimiser_is_refused() -> None:
    with pytest.raises(SpecError, match="optimiser is one of"):
        TrainSpec(optimiser="lion")  # type: ignore[arg-type]
