"""The scaling model against this machine: steps on 1 and 2 ranks, calibrated, nothing fitted."""

from __future__ import annotations

import dataclasses

import pytest

from bigunet.machines import Link, machine
from bigunet.scaling import predict
from bigunet.scaling.messages import gradient_buckets, small_messages
from bigunet.scaling_check import ScalingCase, check_scaling
from bigunet.spec import TrainSpec, UNetSpec


@pytest.mark.alone
def test_predictions_come_near_measured_steps() -> None:
    """Within 35 %: two rounds on a machine that may be busy. `benchmarks/scaling_predicted.py`
    has more of both, and is far closer."""
    cases = {
        "4 levels": ScalingCase(
            UNetSpec(levels=4, channels=16, classes=6), TrainSpec(tile=128), (256, 256)
        ),
        "an odd tile": ScalingCase(
            UNetSpec(levels=3, channels=16, classes=6), TrainSpec(tile=128), (128, 384)
        ),
    }
    table = check_scaling(cases, rounds=3, progress=False)
    assert table.measured_seconds.dims == ("case", "gpus", "round")
    assert abs(table.ratio - 1).max() < 0.35
    # Three tiles on two ranks: one rank has two of them, and both know it.
    odd = table.sel(case="an odd tile")
    for seconds in (odd.predicted_seconds, odd.measured_seconds):
        gain = (seconds.sel(gpus=1) / seconds.sel(gpus=2)).median()
        assert 1.1 < gain < 1.75


def test_a_timed_all_reduce_takes_the_place_of_the_links() -> None:
    """2 (R - 1) steps of 1 / R of the bytes each, message by message."""
    timed = Link("timed", 1e9, 1e-4)
    on = dataclasses.replace(machine("h200"), all_reduce=timed)
    spec, train = UNetSpec(levels=3, channels=8, classes=3), TrainSpec(tile=32)
    found = predict(spec, (64, 64), train, on, 4, "sample-parallel")
    sizes = [*gradient_buckets(spec), *small_messages(spec, train, 4)]
    expected = sum(6 * (1e-4 + size / 4 / 1e9) for size in sizes)
    assert found["seconds"].sel(term="all-reduce").item() == pytest.approx(expected, rel=1e-9)
