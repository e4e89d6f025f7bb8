"""Plans: what is refused, what they tell, and YAML that gives back the same plan."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from bigunet.errors import PlanError
from bigunet.plan import Plan, devices_of, place
from bigunet.spec import TrainSpec, UNetSpec

SPEC = UNetSpec(levels=3, channels=8)
NAMES = [
    row.name
    for row in Plan(
        spec=SPEC,
        train=TrainSpec(),
        shape_BCHW=(1, 3, 8, 8),
        stages=(("enc0_conv0", "head"),),
        devices=(0,),
        micro_batches=1,
    ).table
]


def plan_with(cuts: tuple[int, ...], **changes: Any) -> Plan:
    ends = (0, *cuts, len(NAMES))
    values: dict[str, Any] = {
        "spec": SPEC,
        "train": TrainSpec(),
        "shape_BCHW": (8, 3, 32, 32),
        "stages": tuple((NAMES[a], NAMES[b - 1]) for a, b in pairwise(ends)),
        "devices": tuple(range(len(ends) - 1)),
        "micro_batches": 4,
    }
    return Plan(**(values | changes))


def test_read_outs() -> None:
    plan = plan_with((5, 12, 20), devices=(0, 1, 1, 0), tiles=2)
    assert plan.cuts == (0, 5, 12, 20, len(NAMES))
    assert (plan.num_stages, plan.num_devices, plan.num_ranks) == (4, 2, 4)
    assert plan.placement == "folded"
    assert plan.stages_of(0) == (0, 3)
    assert [row.name for row in plan.stage_rows(1)] == NAMES[5:12]
    assert plan.position(3) == (1, 1)
    assert plan.micro_batch == 2


def test_skip_pairs_are_those_that_leave_their_stage() -> None:
    source = {row.name: row.source for row in plan_with(()).table}
    plan = plan_with((5, 12, 20))
    stage_of = {n: s for s in range(4) for n in [r.name for r in plan.stage_rows(s)]}
    expected = {(stage_of[s], stage_of[n]) for n, s in source.items() if s}
    assert set(plan.skip_pairs()) == {pair for pair in expected if pair[0] != pair[1]}


def test_placements() -> None:
    assert devices_of("straight", 3) == (0, 1, 2)
    assert devices_of("folded", 6) == (0, 1, 2, 2, 1, 0)
    assert devices_of("interleaved", 6, 3) == (0, 1, 2, 0, 1, 2)
    for devices in ((0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1)):
        assert devices_of(place(devices), len(devices), 2) == devices  # type: ignore[arg-type]
    assert place((0, 0, 1)) is None
    for bad in (
        lambda: devices_of("folded", 3),
        lambda: devices_of("interleaved", 5, 2),
        lambda: devices_of("interleaved", 4),
        lambda: devices_of("upside-down", 4),  # type: ignore[arg-type]
    ):
        with pytest.raises(PlanError):
            bad()


@settings(max_examples=40)
@given(
    cuts=st.sets(st.integers(1, len(NAMES) - 1), max_size=5),
    count=st.sampled_from([1, 2, 4, 8]),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    skips=st.sampled_from(["hop", "direct"]),
    tiles=st.integers(1, 3),
    scene=st.none() | st.tuples(st.integers(1, 10**5), st.integers(1, 10**5)),
    rate=st.floats(1e-12, 10),
    recompute=st.sampled_from(["none", "block", "stage", "except_last"]),
    name=st.text(max_size=8),
)
def test_yaml_round_trip_is_exact(
    cuts: set[int],
    count: int,
    schedule: str,
    skips: str,
    tiles: int,
    scene: object,
    rate: float,
    recompute: str,
    name: str,
) -> None:
    plan = plan_with(
        tuple(sorted(cuts)),
        micro_batches=count,
        schedule=schedule,
        skips=skips,
        tiles=tiles,
        scene_shape=scene,
        train=TrainSpec(learning_rate=rate, recompute=recompute),  # type: ignore[arg-type]
        machine=name,
    )
    text = plan.to_yaml()
    again = Plan.from_yaml(text)
    assert again == plan
    assert again.to_yaml() == text
    assert yaml.safe_load(text)["bigunet_plan"] == 1


def test_files(tmp_path: Path) -> None:
    plan = plan_with((7,))
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"micro_batches": 3}, "must divide the batch"),
        ({"micro_batches": 0}, "micro_batches"),
        ({"micro_batches": True}, "micro_batches"),
        ({"schedule": "chaos"}, "schedule is one of"),
        ({"skips": "lost"}, "skips is one of"),
        ({"tiles": 0}, "tiles"),
        ({"devices": (0,)}, "2 stages have 2 devices"),
        ({"devices": (0, 2)}, "without gap"),
        ({"devices": (1, 2)}, "without gap"),
        ({"shape_BCHW": (8, 3, 32)}, "shape_BCHW"),
        ({"stages": ()}, "number of stages"),
        ({"stages": (("enc0_conv0", "pool0"), ("mid_conv0", "head"))}, "without gap"),
        ({"stages": (("enc0_conv0", "head"), ("mid_conv0", "head"))}, "without gap"),
        ({"stages": (("mid_conv0", "head"), ("enc0_conv0", "pool0"))}, "without gap"),
        ({"stages": (("enc0_conv0", "pool0"), ("enc1_conv0", "cat0"))}, "ends at head"),
        ({"stages": (("enc0_conv0", "enc7_conv0"), ("x", "head"))}, "another spec"),
        ({"stages": tuple((n, n) for n in NAMES) * 2}, "number of stages"),
        ({"scene_shape": (1,)}, "scene_shape"),
    ],
)
def test_faults_are_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        plan_with((7,), **changes)


def test_interleaved_1f1b_takes_whole_groups() -> None:
    with pytest.raises(PlanError, match="groups of 3"):
        plan_with((4, 8, 12, 16, 20), devices=(0, 1, 2) * 2, schedule="1f1b", micro_batches=4)


def test_bad_yaml() -> None:
    good = plan_with((7,)).to_dict()
    for change, text in (
        ({"bigunet_plan": 2}, "version 1"),
        ({"colour": "red"}, "unknown colour"),
        ({"spec": 3}, "spec is a mapping"),
        ({"spec": {"levels": 0}}, "levels"),
        ({"train": {"speed": 1}}, "speed"),
        ({"stages": 5}, "types"),
        ({"stages": [["enc0_conv0"]]}, "pair"),
        ({"devices": [0.0, 1.0]}, "without gap"),
        ({"micro_batches": "4"}, "micro_batches"),
    ):
        with pytest.raises(PlanError, match=text):
            Plan.from_dict(good | change)
    with pytest.raises(PlanError, match="missing stages"):
        Plan.from_dict({k: v for k, v in good.items() if k != "stages"})
    for text in ("[", "- 1", "", "!!python/object/apply:os.getcwd []"):
        with pytest.raises(PlanError):
            Plan.from_yaml(text)


def test_a_run_must_be_the_planned_one() -> None:
    plan = plan_with((7,), tiles=2)
    plan.check_run(SPEC, 4)
    for ranks in (3, 5):
        with pytest.raises(PlanError, match="runs on 4 ranks"):
            plan.check_run(SPEC, ranks)
    with pytest.raises(PlanError, match="channels=16"):
        plan.check_run(SPEC.replace(channels=16), 4)
