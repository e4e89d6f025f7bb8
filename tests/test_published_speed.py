"""The published speed-ups: read as printed, simulated within the stated bounds."""

from __future__ import annotations

import statistics

from bigunet.published_speed import published_speed_ups


def test_published_speed_ups_are_simulated_within_their_bounds() -> None:
    rows = published_speed_ups()
    assert [row.published_speed_up for row in rows] == [1.0, 0.858, 1.246, 2.352]
    assert [row.stages for row in rows] == [1, 1, 2, 4]
    errors = [abs(row.ratio - 1) for row in rows]
    assert max(errors) <= 0.15
    assert statistics.median(errors[1:]) <= 0.08  # the first is 0 by definition
