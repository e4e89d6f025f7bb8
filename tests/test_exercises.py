"""The exercises: right answers are right, others get a reason and never the answer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest

from bigunet.checkpoint import demo_weights
from bigunet.errors import SpecError
from bigunet.exercises import EXERCISES, check
from bigunet.mosaic import segment
from bigunet.scenes import earth
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.views import MemoryState

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
COURSE = UNetSpec(levels=4, channels=32, max_channels=256, classes=8, norm="batch")
TRAIN = TrainSpec(tile=384)
BLOCKS = TRAIN.replace(recompute="block")
WAYS = [
    MemoryState(COURSE, TRAIN, 10_000, 2048),
    MemoryState(COURSE, BLOCKS, 10_000, 3072),
    MemoryState(COURSE.replace(channels=2), BLOCKS, 10_000, 0),
]
# Worked out by hand, not by the library: (answer, text that no other verdict may hold).
RIGHT: dict[str, tuple[Any, str]] = {
    "00.1": (6.25, r"6\.25"),  # ((64 + 2 * 48) / 64) ** 2
    "00.2": ("class borders", "class borders"),
    "00.3": ((0, 1950, 0, 5400), "1950|5400"),
    "01.1": (570, "570"),  # (3 * 32 - 1) * 6
    "01.2": (UNetSpec(levels=2, convs=3), "levels=2"),
    "01.3": (8, r"\b8\b"),
    "02.1": (WAYS, "3072"),
    "02.2": (6, r"\b6\b"),
    "02.3": ("last decoder block", "last decoder"),
    "03.1": (320, "320"),  # 8 * 40
    "03.2": (1.9, r"1\.9"),
    "03.3": (UNetSpec(norm="instance"), "instance"),
    "04.1": (18, r"\b18\b"),  # 2 / 20
    "04.2": ("transfer of skips", "transfer"),
    "05.1": (0.78125, r"0\.78|128"),  # 100 tiles, 2 for the busiest of 64
    "05.2": ("all-reduce", "all-reduce"),
    "05.3": (1.998, r"1\.99"),  # 2 * 999 / 1000
    "06.1": (2, r"\b2\b"),  # 16 tiles, 8 a pipeline, 4 a pass
    "06.2": ("gradients", "gradients"),
    "06.3": (2, r"\b2\b"),
    "07.1": (0.503, r"0\.5"),  # cos(60 degrees), and 0.6 % for the flattening
    "07.2": ("geotiff", "geotiff"),
}
WRONG: dict[str, list[Any]] = {
    "00.1": [2.5, 5.94, 3.06, 1, 100],
    "00.2": ["tile edges"],
    "00.3": [(0, 100, 0, 5400), (10, 1960, 0, 5400), (0, 1950, 3, 5403)],
    "01.1": [564, 576, 1146, 285, 1, 1000],
    "01.2": [UNetSpec(), UNetSpec(levels=2, convs=3, up="bilinear")],
    "01.3": [54, 0, 3, 1, 100],
    "02.1": [[], WAYS[:2], [*WAYS[:2], WAYS[1]], [WAYS[0]] * 3,
             [*WAYS[:2], MemoryState(COURSE, TRAIN, 10_000, 0)],
             [*WAYS[1:], MemoryState(COURSE, TRAIN, 500, 256)],
             [*WAYS[1:], MemoryState(COURSE, TRAIN, 10_000, 512, "A100-80GB")]],
    "02.2": [5, 2, 7],
    "02.3": ["first encoder block", "bottleneck"],
    "03.1": [768, 9216, 3840, 5, 1e6],
    "03.2": [1.5, 1, 2],
    "03.3": [UNetSpec(), UNetSpec(norm="batch")],
    "04.1": [17, 19, 3, 100, 0, -4],
    "04.2": ["bubble", "kernel starts"],
    "05.1": [0.64, 1.5625, 0.5, 1, 0.2, 3],
    "05.2": ["compute", "halo redundancy"],
    "05.3": [1, 1000, 999, 1998, 0.999, 0.1, 5],
    "06.1": [4, 8, 1, 16],
    "06.2": ["maps", "skips"],
    "06.3": [1, 3, 6],
    "07.1": [1.0, 0.25, 0.87],
    "07.2": ["png", "csv"],
}  # fmt: skip


def test_every_exercise_has_answers_here() -> None:
    assert set(EXERCISES) == set(RIGHT) == set(WRONG)


@pytest.mark.parametrize("key", RIGHT)
def test_the_right_answer_is_right_and_no_other_verdict_gives_it(key: str) -> None:
    answer, secret = RIGHT[key]
    verdict = check(key, answer)
    assert verdict.right is True, verdict
    assert repr(verdict).startswith("Right. ")
    for other in WRONG[key]:
        wrong = check(key, other)
        assert wrong.right is False, (other, wrong)
        assert len(wrong.text) > 8
        assert not re.search(secret, wrong.text, re.I), (other, wrong)


@pytest.mark.parametrize("key", EXERCISES)
def test_no_answer_and_nonsense_are_told_what_is_meant(key: str) -> None:
    nothing = check(key, None)
    assert nothing.right is None
    assert EXERCISES[key].question in nothing.text
    assert repr(nothing).startswith("Not answered yet. ")
    for nonsense in ("blue", object(), [[]]):
        assert check(key, nonsense).right is False


def test_an_answer_that_cannot_be_is_told_why() -> None:
    verdict = check("02.1", [MemoryState(COURSE, TRAIN, 10_000, 50)] * 3)
    assert "stride" in verdict.text
    with pytest.raises(SpecError, match=r"exercises are 00\.1"):
        check("99.9", 1)


def test_errors_do_gather_at_class_borders() -> None:
    """The answer of 00.2, measured: error rates near borders and near tile edges."""
    scene = earth().crop(300, 684, 2600, 2984)
    tile = 64
    found = segment(demo_weights(), scene.image, tile=tile, progress=False).labels.values
    truth = scene.labels.values
    counts = truth != 255
    wrong = (found != truth) & counts
    border = np.zeros_like(counts)
    for axis in (0, 1):
        for shift in (-1, 1):
            border |= np.roll(truth, shift, axis) != truth
    near = np.minimum(np.arange(384) % tile, tile - 1 - np.arange(384) % tile) < 2
    edge = near[:, None] | near[None, :]
    assert wrong[border & counts].mean() > 1.5 * wrong[~border & counts].mean()
    at_edges, elsewhere = wrong[edge & counts].mean(), wrong[~edge & counts].mean()
    assert abs(at_edges - elsewhere) < 0.1 * elsewhere


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_asks_its_own_exercises_in_order(path: Path) -> None:
    """Each folded answer belongs to one cell that checks."""
    cells = nbformat.read(path, as_version=4).cells
    asked = [
        key
        for cell in cells
        if cell.cell_type == "code"
        for key in re.findall(r'^check\("([\d.]+)", \w+\)$', cell.source, re.M)
    ]
    assert asked == [key for key in EXERCISES if key.startswith(path.stem[:2] + ".")]
    folded = sum(c.source.count("<details>") for c in cells if c.cell_type == "markdown")
    assert len(asked) == folded
