"""Hand-overs: written and read without loss, taken from the nearest earlier notebook."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from bigunet.checkpoint import demo_weights
from bigunet.cli import app
from bigunet.errors import PlanError
from bigunet.exactness import compare_gradients
from bigunet.handover import COURSE, Handover, hand_on, narrow_plan, take_up
from bigunet.plan import Plan
from bigunet.rehearsal import plan_gradients
from bigunet.spec import TrainSpec, UNetSpec


def planned(course: Handover) -> Plan:
    return Plan(
        spec=course.spec,
        train=course.train,
        shape_BCHW=(4, 3, 480, 480),
        stages=(("enc0_conv0", "enc2_act0"), ("enc2_conv1", "head")),
        devices=(0, 1),
        micro_batches=4,
    )


def test_the_defaults_are_the_shipped_network_and_the_course_exists(root: Path) -> None:
    assert Handover().spec == demo_weights().spec
    assert take_up("00_start", "no such folder") == Handover()
    stems = {path.stem for path in (root / "notebooks").glob("*.ipynb")}
    assert stems <= set(COURSE)


def test_the_nearest_earlier_notebook_counts(tmp_path: Path) -> None:
    course = Handover(train=TrainSpec(tile=256))
    hand_on("01_receptive_field_and_halo", course, tmp_path)
    hand_on("03_sample_parallel", course.replace(window=(0, 100, 0, 200)), tmp_path)
    assert take_up("01_receptive_field_and_halo", tmp_path) == Handover()
    second = take_up("02_memory", tmp_path)
    assert second == course.replace(origin="01_receptive_field_and_halo")
    assert take_up("03_sample_parallel", tmp_path) == second
    assert take_up("07_your_own_scene", tmp_path).window == (0, 100, 0, 200)


def test_a_plan_travels_as_the_file_that_torchrun_reads(tmp_path: Path) -> None:
    course = Handover()
    plan = planned(course)
    path = hand_on("04_stage_splits", course.with_plan(plan), tmp_path)
    assert Plan.load(path) == plan
    taken = take_up("05_scaling", tmp_path)
    assert taken.plan == plan
    assert "2 ranks" in str(taken)
    # Handed on again without a plan, the old plan's file is no part of it any more.
    hand_on("04_stage_splits", course, tmp_path)
    assert take_up("05_scaling", tmp_path).plan is None


def test_the_command_line_reads_its_sections(tmp_path: Path) -> None:
    course = Handover(spec=UNetSpec(levels=3, channels=8), train=TrainSpec(recompute="block"))
    path = str(hand_on("02_memory", course, tmp_path))
    arguments = ["memory", "--spec", path, "--train", path, "--height", "64"]
    done = CliRunner().invoke(app, [*arguments, "--width", "64", "--json"])
    assert done.exit_code == 0, done.output
    assert yaml.safe_load(done.output)["recompute"] == "block"


def test_the_narrow_network_has_the_same_layers_and_cuts() -> None:
    course = Handover()
    narrow = course.narrow(5)
    assert (narrow.halo, narrow.stride) == (course.spec.halo, course.spec.stride)
    plan = planned(course)
    small = narrow_plan(plan, 5, (4, 3, 32, 32))
    assert small.cuts == plan.cuts
    assert [r.name for r in small.table] == [r.name for r in plan.table]
    # And it runs: two stages give the plain network's gradients, in float64.
    one = plan_gradients(small, engine="reference")
    whole = plan_gradients(
        narrow_plan(plan, 5, (4, 3, 32, 32), stages=(("enc0_conv0", "head"),), devices=(0,)),
        engine="reference",
    )
    assert float(compare_gradients(whole, one).relative_difference.max()) < 1e-10


def broken(name: str, value: object) -> str:
    return yaml.safe_dump({**Handover().to_dict(), name: value})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "key bigunet_handover"),
        ("a: [", "read as YAML"),
        (broken("bigunet_handover", 99), "version 1; got 99"),
        (broken("spec", {"levels": 0}), "levels is an integer"),
        (broken("spec", 3), "has the fields"),
        (broken("more", 3), "has the fields"),
        (broken("window", [0, 10, 5]), "a window is"),
        (broken("window", 7), "have their types"),
    ],
)
def test_a_file_that_is_none_is_refused_with_a_remedy(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "00_start.yaml").write_text(text)
    with pytest.raises(PlanError, match=said):
        take_up("01_receptive_field_and_halo", tmp_path)


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    course = Handover()
    plan = planned(course)
    with pytest.raises(PlanError, match="with the train that it was made for"):
        course.with_plan(plan).replace(train=TrainSpec(tile=64))
    with pytest.raises(PlanError, match="notebooks are 00_start"):
        take_up("08_more", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="--copy-to"):
        hand_on("00_start", course, tmp_path / "file")
