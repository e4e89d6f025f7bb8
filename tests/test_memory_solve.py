"""What fits, why not, and what would help."""

from __future__ import annotations

import json

import pytest

from bigunet.errors import MemoryBudgetError, SpecError
from bigunet.layers import layer_table
from bigunet.memory import (
    deepest,
    fit_table,
    largest_batch,
    largest_tile,
    peak_bytes,
    static_bytes,
    why_not,
)
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import inner_tile
from bigunet.tracing import trace_peak

MIB = 2**20
BASE = UNetSpec(levels=3, convs=2, channels=8)
SETTINGS = [
    (spec, train, budget)
    for spec in (
        BASE,
        BASE.replace(norm="batch", up="nearest", convs=1),
        BASE.replace(levels=2, convs=1, up="bilinear", activation="silu"),
        BASE.replace(padding_mode="reflect", kernel=5, convs=1),
    )
    for train, budget in (
        (TrainSpec(), 64 * MIB),
        (TrainSpec(optimiser="sgd"), 150 * MIB),
        (TrainSpec(precision="bf16"), 90 * MIB),
        (TrainSpec(precision="bf16-autocast"), 200 * MIB),
        (TrainSpec(recompute="block"), 77 * MIB),
    )
]


@pytest.mark.parametrize("case", range(len(SETTINGS)))
def test_the_largest_tile_traced_fits_and_two_steps_more_do_not(case: int) -> None:
    """20 settings: the traced maximum is at most one step larger than the predicted one."""
    spec, train, budget = SETTINGS[case]
    found = largest_tile(spec, train, budget)
    assert found.peak <= budget < (found.next_peak or 0)
    assert found.next_size == found.size + spec.stride

    def traced(side: int) -> int:
        tile = inner_tile(side, spec)
        return trace_peak(spec, (1, 3, *tile.read.shape), train, tile=tile)["total"]

    assert traced(found.size) <= budget
    assert traced(found.size + 2 * spec.stride) > budget


def test_the_largest_batch_is_the_true_maximum() -> None:
    for train in (TrainSpec(), TrainSpec(recompute="stage")):
        found = largest_batch(BASE, (1, 3, 64, 64), train, 100 * MIB)
        peaks = [peak_bytes(BASE, (n, 3, 64, 64), train)[0] for n in (found.size, found.size + 1)]
        assert peaks == [found.peak, found.next_peak]
        assert peaks[0] <= 100 * MIB < peaks[1]


def test_the_deepest_network_is_the_true_maximum() -> None:
    found = deepest(BASE, (1, 3, 256, 256), TrainSpec(), 256 * MIB)
    fits = [
        levels
        for levels in range(1, 10)
        if peak_bytes(BASE.replace(levels=levels), (1, 3, 256, 256), TrainSpec())[0] <= 256 * MIB
    ]
    assert found.size == max(fits)
    assert found.next_size == found.size + 1


def test_a_budget_below_the_parameters_says_so() -> None:
    least = static_bytes(BASE, TrainSpec())
    for search in (
        lambda budget: largest_tile(BASE, TrainSpec(), budget),
        lambda budget: largest_batch(BASE, (1, 3, 64, 64), TrainSpec(), budget),
    ):
        with pytest.raises(MemoryBudgetError, match="parameters, gradients and optimiser state"):
            search(least - 1)
        with pytest.raises(MemoryBudgetError, match="takes"):
            search(least + 1)
    with pytest.raises(MemoryBudgetError, match="at least 1"):
        largest_tile(BASE, TrainSpec(), 0)
    with pytest.raises(MemoryBudgetError, match="at least 1"):
        largest_tile(BASE, TrainSpec(), -5)
    with pytest.raises(SpecError, match="a device is one of"):
        largest_tile(BASE, TrainSpec(), "abacus")


def test_why_not_ranks_what_helps_and_each_saving_is_true() -> None:
    shape, train = (1, 3, 1024, 1024), TrainSpec()
    found = why_not(BASE, shape, train, 200 * MIB)
    assert not found.fits
    assert found.peak == peak_bytes(BASE, shape, train)[0]
    assert sum(cause.nbytes for cause in found.causes) == found.peak
    assert found.causes[0].name == "activations"
    by_name = {remedy.name: remedy for remedy in found.remedies}
    assert {"recompute", "bf16", "bf16 autocast", "SGD", "smaller tile", "two stages"} <= set(
        by_name
    )
    fits = [remedy.fits for remedy in found.remedies]
    assert fits == sorted(fits, reverse=True)
    assert by_name["smaller tile"].fits
    for remedy in found.remedies:
        assert remedy.saved == found.peak - remedy.peak > 0
        assert remedy.fits == (remedy.peak <= found.budget)
    after = peak_bytes(BASE, shape, train.replace(recompute="block"))[0]
    assert by_name["recompute"].peak == after
    # One forward pass more, of three passes' worth.
    assert by_name["recompute"].time_factor == pytest.approx(4 / 3)
    side = largest_tile(BASE, train, 200 * MIB).size
    tile = inner_tile(side, BASE)
    flops = sum(row.flops for row in layer_table(BASE, (1, 3, *tile.read.shape), tile=tile))
    whole = sum(row.flops for row in layer_table(BASE, shape))
    expected = flops / side**2 / (whole / 1024**2)
    assert by_name["smaller tile"].time_factor == pytest.approx(expected)
    assert expected > 1


def test_bf16_on_a_device_without_units_for_it_is_offered_for_memory_only() -> None:
    for device, slow in (("V100-16GB", True), ("P40", True), ("A100-40GB", False)):
        remedies = why_not(BASE, (1, 3, 1024, 1024), TrainSpec(), device).remedies
        found = [r for r in remedies if r.name.startswith("bf16")]
        assert len(found) == 2
        assert all(("no units for bf16" in r.change) == slow for r in found)


def test_two_stages_are_cut_where_the_larger_one_is_smallest() -> None:
    shape, train = (1, 3, 256, 256), TrainSpec()
    for spec in (BASE, BASE.replace(levels=5, up="nearest")):
        rows = layer_table(spec, shape)
        ends = [i for i in range(1, len(rows)) if rows[i].block != rows[i - 1].block]
        best = min(
            max(peak_bytes(spec, shape, train, stages=(end, len(rows) - end))) for end in ends
        )
        found = {r.name: r.peak for r in why_not(spec, shape, train, 100 * MIB).remedies}
        assert found["two stages"] == best


def test_the_cropped_decoder_is_offered_where_a_tile_is_not_cropped() -> None:
    tile = inner_tile(32, BASE, cropped=False)
    shape = (1, 3, *tile.read.shape)
    found = why_not(BASE, shape, TrainSpec(), 10 * MIB, tile=tile)
    remedy = next(r for r in found.remedies if r.name == "cropped decoder")
    assert remedy.time_factor < 1
    cropped = inner_tile(32, BASE)
    assert remedy.peak == peak_bytes(BASE, shape, TrainSpec(), tile=cropped)[0]
    again = why_not(BASE, shape, TrainSpec(), 10 * MIB, tile=cropped)
    assert "cropped decoder" not in {r.name for r in again.remedies}


def test_tables_are_plain_json() -> None:
    table = fit_table(BASE, (2, 3, 64, 64), TrainSpec(), "V100-16GB")
    assert json.loads(json.dumps(table)) == table
    assert table["budget_bytes"] == 16 * 2**30
    assert table["diagnosis"]["fits"]
    assert table["largest_tile"]["next_peak"] > 16 * 2**30
    small = fit_table(BASE, (2, 3, 64, 64), TrainSpec(), 1000)
    assert small["largest_tile"] is None
