"""Costs: the roofline by hand, measured seconds, what crosses a cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigunet.cost import (
    MeasuredCost,
    RooflineCost,
    RowCosts,
    activation_bytes,
    micro_batch_rows,
    open_skips,
    skips_of,
)
from bigunet.errors import PlanError
from bigunet.layers import LayerRow, layer_table
from bigunet.machines import Processor, machine
from bigunet.spec import UNetSpec

SPEC = UNetSpec(levels=3, channels=8)
TABLE = layer_table(SPEC, (4, 3, 32, 32))
TOY = Processor("toy", {"fp32": 1e9, "bf16": 4e9}, 1e6, 10**9, 1e-3, "made up")


def test_a_convolution_by_hand() -> None:
    row = LayerRow("x", "enc1", 1, "conv", (1, 8, 4, 4), (1, 16, 4, 4), 1152, 0, 36864)
    moved = 4 * (8 * 16 + 16 * 16 + 1152)
    costs = RooflineCost(TOY)([row])
    # One launch forward, two back; the memory is the slower roof here.
    assert costs.forward_seconds[0] == pytest.approx(moved / 1e6 + 1e-3, rel=1e-12)
    assert costs.backward_seconds[0] == pytest.approx(2 * moved / 1e6 + 2e-3, rel=1e-12)
    slow = Processor("slow", {"fp32": 1e4, "bf16": 1e4}, 1e6, 1, 0.0, "made up")
    costs = RooflineCost(slow)([row])
    assert costs.forward_seconds[0] == pytest.approx(3.6864, rel=1e-12)
    assert costs.backward_seconds[0] == pytest.approx(2 * 3.6864, rel=1e-12)


def test_half_precision_halves_the_bytes() -> None:
    still = Processor("t", {"fp32": 1e30, "bf16": 1e30}, 1e6, 1, 0.0, "made up")
    single, half = (RooflineCost(still, p)(TABLE) for p in ("fp32", "bf16"))
    # A pooling's positions are 64-bit numbers at any precision.
    others = [row.kind != "pool" for row in TABLE]
    for name in ("forward_seconds", "backward_seconds"):
        whole, part = getattr(single, name)[others], getattr(half, name)[others]
        np.testing.assert_allclose(part, whole / 2, rtol=1e-12)


def test_twice_the_batch_costs_twice_the_streaming() -> None:
    still = Processor("t", {"fp32": 1e9, "bf16": 1e9}, 1e30, 1, 0.0, "made up")
    cost = RooflineCost(still)
    one, two = cost(micro_batch_rows(TABLE, 4)), cost(micro_batch_rows(TABLE, 2))
    np.testing.assert_allclose(two.forward_seconds, 2 * one.forward_seconds, rtol=1e-9)


def test_published_baseline_throughput_is_near() -> None:
    """torchgpipe's U-Net (5, 64), batch 40, one P40: 28.5 images a second published."""
    rows = layer_table(UNetSpec.torchgpipe(5, 64), (40, 3, 192, 192))
    costs = RooflineCost(machine("p40").processor)(rows)
    seconds = costs.forward_seconds.sum() + costs.backward_seconds.sum()
    assert 40 / seconds == pytest.approx(28.5, rel=0.10)


def test_measured_seconds_are_linear_between_sizes() -> None:
    names = [row.name for row in TABLE]
    cost = MeasuredCost(
        (1, 2, 4), dict.fromkeys(names, (1.0, 3.0, 4.0)), dict.fromkeys(names, (2.0, 2.0, 2.0))
    )
    for batch, seconds in ((1, 1.0), (2, 3.0), (3, 3.5), (4, 4.0), (8, 6.0)):
        rows = [row._replace(in_shape=(batch, *row.in_shape[1:])) for row in TABLE]
        got = cost(rows)
        np.testing.assert_allclose(got.forward_seconds, seconds)
        np.testing.assert_allclose(got.backward_seconds, 2.0)
    single = MeasuredCost((2,), dict.fromkeys(names, (1.0,)), dict.fromkeys(names, (2.0,)))
    np.testing.assert_allclose(single(TABLE).forward_seconds, 2.0)


def test_micro_batches_are_equal_or_refused() -> None:
    rows = micro_batch_rows(TABLE, 2)
    assert rows == layer_table(SPEC, (2, 3, 32, 32))
    with pytest.raises(PlanError, match="Use one of 1, 2, 4"):
        micro_batch_rows(TABLE, 3)
    with pytest.raises(PlanError):
        micro_batch_rows(TABLE, 0)


@given(st.integers(1, 5), st.integers(1, 3))
def test_open_skips_are_those_between_source_and_sink(levels: int, convs: int) -> None:
    spec = UNetSpec(levels=levels, convs=convs, channels=4)
    rows = layer_table(spec, (1, 3, 32, 32))
    skips = skips_of(rows, "fp32")
    assert len(skips) == levels - 1
    alive = open_skips(skips, len(rows))
    outputs = activation_bytes(rows, "fp32")
    for cut in range(len(rows) + 1):
        expected = 0
        for i, row in enumerate(rows):
            if row.source is None:
                continue
            source = next(k for k, other in enumerate(rows) if other.name == row.source)
            if source < cut <= i:
                expected += int(outputs[source])
        assert alive[cut] == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: RowCosts(np.ones(3), np.ones(2)),
        lambda: RowCosts(np.array([-1.0]), np.ones(1)),
        lambda: MeasuredCost((), {}, {}),
        lambda: MeasuredCost((2, 1), {"a": (1.0, 1.0)}, {"a": (1.0, 1.0)}),
        lambda: MeasuredCost((1,), {"a": (1.0, 1.0)}, {"a": (1.0, 1.0)}),
        lambda: MeasuredCost((1,), {"a": (1.0,)}, {"b": (1.0,)}),
        lambda: MeasuredCost((1,), {"a": (1.0,)}, {"a": (1.0,)})(TABLE),
    ],
)
def test_bad_costs_are_refused(make: object) -> None:
    with pytest.raises(PlanError):
        make()  # type: ignore[operator]


def test_seconds_by_pixels_follow_a_layers_map() -> None:
    """Points on 2 + 3 p a pixel are found again, between them and beyond."""
    rows = layer_table(SPEC, (1, 3, 64, 64))
    line = {row.name: tuple(2.0 + 3.0 * p for p in (100, 100, 400)) for row in rows}
    pixels = {row.name: (100, 100, 400) for row in rows}
    cost = MeasuredCost((1, 2, 3), line, line, pixels=pixels)
    for height, width in ((64, 64), (32, 16), (8, 8)):
        table = layer_table(SPEC, (2, 3, height, width))
        expected = [2.0 + 3.0 * 2 * row.out_shape[2] * row.out_shape[3] for row in table]
        assert cost(table).forward_seconds == pytest.approx(expected)
    one = MeasuredCost((1,), {r.name: (4.0,) for r in rows}, {r.name: (8.0,) for r in rows},
                       pixels={r.name: (64 * 64,) for r in rows})  # fmt: skip
    assert one(rows).backward_seconds[0] == pytest.approx(8.0)
    assert one(layer_table(SPEC, (1, 3, 32, 64))).backward_seconds[0] == pytest.approx(4.0)


def test_pixels_that_fall_or_are_missing_are_refused() -> None:
    seconds = {"a": (1.0, 2.0)}
    for pixels in ({"a": (2, 1)}, {"a": (1,)}, {}):
        with pytest.raises(PlanError, match="rising"):
            MeasuredCost((1, 2), seconds, seconds, pixels=pixels)
