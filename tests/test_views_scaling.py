"""ScalingExplorer as data: state in, the library's own predictions out; plans that run."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import holoviews as hv
import numpy as np
import pytest
import xarray as xr
import yaml
from typer.testing import CliRunner

from bigunet.cli import app
from bigunet.errors import PlanError, ShapeError, SpecError
from bigunet.layers import layer_table
from bigunet.machines import MACHINES, machine
from bigunet.plan import Plan
from bigunet.scaling import STRATEGIES, TERMS, Choice, best, phase_map, predict
from bigunet.scaling_file import load_scaling, measured_curve, new_scaling, save_scaling
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.views import ScalingExplorer, ScalingState
from bigunet.views.scaling_launch import best_plan, job_of, run_script
from bigunet.views.scaling_plots import (
    LETTERS,
    TERM_COLOURS,
    map_cell,
    plot_efficiency,
    plot_map,
    plot_speedup,
    plot_terms,
)
from bigunet.views.scaling_tables import (
    ScalingSetting,
    choice_of,
    gpu_stops,
    map_of,
    scaling_tables,
)

SPEC = UNetSpec(levels=3, channels=8)
TRAIN = TrainSpec(tile=64)
STATE = ScalingState(SPEC, TRAIN, image=512, images=4, machine="perlmutter", gpus=48)


def explorer(**changes: Any) -> ScalingExplorer:
    values: dict[str, Any] = {
        "image": 512,
        "images": 4,
        "machine": "perlmutter",
        "gpus": 48,
    } | changes
    return ScalingExplorer(SPEC, TRAIN, **values)


def measured(image: int = 512, images: int = 4) -> xr.Dataset:
    table = new_scaling(
        SPEC, TRAIN, (image, image), (1, 2), kind="strong", images=[images] * 2,
        num_tiles=[64 * images] * 2, rounds=2, threads=1, device="a CPU",
    )  # fmt: skip
    table["step_seconds"].values[:] = [[2.0, 4.0], [1.5, 2.5]]
    return table


def texts(plot: hv.Overlay) -> list[str]:
    found = next(part for part in plot if isinstance(part, hv.Labels))
    return [str(text) for text in found.dimension_values(2)]


# Tables -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize("name", ["perlmutter", "p40"])
def test_curves_are_the_library_s_predictions(name: str, weak: bool) -> None:
    state = dataclasses.replace(STATE, machine=name, weak=weak, gpus=6)
    data = scaling_tables(ScalingSetting(), state)
    numbers = [int(n) for n in data["gpus"].values]
    assert numbers == sorted({*numbers, 6})
    assert 6 in numbers
    assert numbers[-1] == min(10_000, MACHINES[name].max_devices)
    for strategy in STRATEGIES:
        told = predict(
            SPEC, (512, 512), TRAIN, machine(name), numbers, strategy, images=4, weak=weak,
            search=False,
        )  # fmt: skip
        mine = data.sel(strategy=strategy)
        known = np.isfinite(mine["step_seconds"].values)
        assert known[numbers.index(6)]
        # What cannot be formed is nowhere; a pipeline's curve ends at 8 stages besides.
        formed = np.isfinite(told["step_seconds"].values)
        if strategy == "pipeline":
            formed &= np.array(numbers) <= 8
        assert (known == formed).all()
        for variable in ("step_seconds", "speedup", "efficiency", "images_per_second",
                         "memory_bytes", "feasible", "gpu_hours", "energy_joules"):  # fmt: skip
            np.testing.assert_array_equal(mine[variable].values[known],
                                          told[variable].values[known])  # fmt: skip
        np.testing.assert_array_equal(mine["seconds"].values[known],
                                      told["seconds"].values.T[known])  # fmt: skip


def test_the_chosen_number_changes_nothing_else() -> None:
    setting = ScalingSetting()
    first = scaling_tables(setting, STATE)
    again = scaling_tables(setting, dataclasses.replace(STATE, gpus=64))
    common = [int(n) for n in again["gpus"].values]
    assert 48 not in common
    xr.testing.assert_identical(
        first["seconds"].sel(gpus=common), again["seconds"].sel(gpus=common)
    )


def test_stops_rise_by_about_equal_factors_to_the_machine_s_end() -> None:
    for entry in MACHINES.values():
        stops = np.array(gpu_stops(entry))
        assert stops[0] == 1
        assert stops[-1] == min(10_000, entry.max_devices)
        assert (stops[1:] > stops[:-1]).all()
        assert (stops[1:] <= 2 * stops[:-1]).all()


def test_the_best_is_the_library_s() -> None:
    found = choice_of(ScalingSetting(), STATE)
    assert isinstance(found, Choice)
    told = best(SPEC, (512, 512), TRAIN, machine("perlmutter"), 48, images=4, search=False)
    assert (found.best, found.seconds, found.why) == (told.best, told.seconds, told.why)
    shown = explorer()
    assert f"Best here: {told.best}, " in shown.summary(shown.data)
    assert told.why in shown.summary(shown.data)


def test_what_does_not_fit_is_said_with_what_would() -> None:
    shown = explorer(machine="p40", gpus=2)
    shown.widgets["channels"].value = 160
    shown.widgets["image"].value = 8192
    shown.widgets["tile"].value = 4096
    text = shown.summary(shown.data)
    assert "It does NOT fit" in text
    assert "fits" in shown.data.attrs["reason"]
    (row,) = [r for r in shown.rows(shown.data) if r[0] == "sample-parallel"]
    assert row[-1] == "NO"
    assert any(words.endswith(" OVER") for words in texts(plot_speedup(shown.data)))


def test_nothing_fits_is_an_answer_too() -> None:
    wide = UNetSpec(levels=8, channels=160)
    state = ScalingState(wide, TrainSpec(tile=2048), 2048, 1, machine="p40", gpus=1)
    setting = ScalingSetting()
    assert "GiB" in str(choice_of(setting, state))
    assert best_plan(setting, state) is None
    shown = ScalingExplorer(wide, TrainSpec(tile=2048), image=2048, images=1, machine="p40", gpus=1)
    assert "Nothing that was tried fits" in shown.summary(shown.data)
    assert "plan.yaml" not in shown.exports()


# Plots ------------------------------------------------------------------------------------------


def test_bars_stand_for_the_terms_of_the_shown_strategy() -> None:
    data = scaling_tables(ScalingSetting(), dataclasses.replace(STATE, strategy="tiles-x-stages"))
    found = next(part for part in plot_terms(data) if isinstance(part, hv.Rectangles))
    bars = list(zip(*(found.dimension_values(i) for i in range(5)), strict=True))
    own = data.sel(strategy="tiles-x-stages")
    for k, term in enumerate(TERMS):
        share = 100 * own["seconds"].values[:, k] / own["step_seconds"].values
        drawn = [y1 - y0 for x0, y0, _, y1, c in bars if c == TERM_COLOURS[term] and x0 < 4]
        expected = [s for s in share if s > 0.005]
        # One more of each colour is the legend's.
        assert len(drawn) in (len(expected), len(expected) + 1)
        assert drawn[: len(expected)] == pytest.approx(expected)
    assert len(set(TERM_COLOURS.values())) == len(TERMS)
    chosen = own.sel(gpus=48)
    words = f"compute: {100 * float(chosen['seconds'][0] / chosen['step_seconds']):.1f} %"
    assert words in texts(plot_terms(data))


def test_curves_carry_letters_the_ideal_and_the_chosen_number() -> None:
    data = scaling_tables(ScalingSetting(), STATE)
    for plot in (plot_speedup(data), plot_efficiency(data)):
        said = texts(plot)
        assert set(LETTERS.values()) <= set(said)
        assert "ideal" in said
        assert "at 48 GPUs:" in said
        for strategy, letter in LETTERS.items():
            assert [t for t in said if t.startswith(f"{letter} {strategy}: ")]
        lines = next(part for part in plot if isinstance(part, hv.Segments))
        ends = np.array([lines.dimension_values(i) for i in range(4)], float).T
        upright = ends[ends[:, 0] == ends[:, 2]]
        assert upright[:, 0] == pytest.approx([math.log10(48)])


def test_measured_points_lie_where_they_were_measured() -> None:
    shown = ScalingExplorer(
        SPEC, TRAIN, image=512, images=4, machine="perlmutter", gpus=2, measured=measured()
    )
    curve = measured_curve(measured())
    assert curve["speedup"].values.tolist() == [1.0, 1.5]
    dots = next(p for p in plot_speedup(shown.data) if isinstance(p, hv.Scatter))
    assert dots.dimension_values(0)[:2] == pytest.approx([0.0, math.log10(2)])
    assert dots.dimension_values(1)[:2] == pytest.approx([0.0, math.log10(1.5)])
    dots = next(p for p in plot_efficiency(shown.data) if isinstance(p, hv.Scatter))
    assert dots.dimension_values(1)[:2] == pytest.approx([1.0, 0.75])
    told = predict(SPEC, (512, 512), TRAIN, machine("perlmutter"), [1, 2], "sample-parallel",
                   images=4)  # fmt: skip
    np.testing.assert_array_equal(
        shown.data["measured_predicted"].values, told["step_seconds"].values
    )
    ((caption, rows),) = shown.more_tables(shown.data).items()
    assert "strong scaling of 3 levels x 8 channels" in caption
    assert [row[:4] for row in rows[1:]] == [
        [1, "3,000.0", "1.00", "100 %"],
        [2, "2,000.0", "1.50", "75 %"],
    ]
    assert "of this setting" in shown.summary(shown.data)
    shown.widgets["image"].value = 528
    assert "of ANOTHER setting" in shown.summary(shown.data)
    assert np.isnan(shown.data["measured_predicted"].values).all()
    assert "measured, another setting" in texts(plot_speedup(shown.data))


# The phase map ----------------------------------------------------------------------------------


def test_the_map_is_made_when_asked_for_and_says_when_it_is_old() -> None:
    shown = explorer()
    assert "not computed yet" in title(shown)
    shown._map_button.click()
    told = map_of(shown.setting, shown.state)
    full = phase_map(
        SPEC, TRAIN, machine("perlmutter"), x=[int(n) for n in told["gpus"].values],
        y=[int(n) for n in told["image"].values], along=("gpus", "image"), images=4,
    )  # fmt: skip
    np.testing.assert_array_equal(shown.data["map_winner"].values, full["winner"].values)
    assert "fastest that fits" in title(shown)
    letters = [t for t in texts(shown._plots["map"]) if len(t) == 1]
    expected = [LETTERS[STRATEGIES[w]] for w in full["winner"].values.flat if w >= 0]
    assert letters == expected
    # Its axes and the tile do not make it old.
    for name, value in (("gpus", 64), ("image", 1024), ("tile", 128)):
        shown.widgets[name].value = value
        assert "OF ANOTHER STATE" not in title(shown), name
    row, column = map_cell(shown.data)
    assert int(shown.data["map_image"][row]) == 1000
    assert abs(math.log(int(shown.data["map_gpus"][column]) / 64)) < math.log(1.6)
    shown.widgets["channels"].value = 9
    assert "OF ANOTHER STATE" in title(shown)
    shown.undo()
    assert "OF ANOTHER STATE" not in title(shown)


def test_a_map_made_before_is_shown_from_the_start() -> None:
    shown = explorer()
    shown.make_map()
    packed: list[Any] = []
    for figure in shown._figures.values():
        figure.pack = lambda figure=figure: packed.append(figure)
    shown.appear()
    assert packed == list(shown._figures.values())
    shown.appear()
    assert len(packed) == len(shown._figures)


def title(shown: ScalingExplorer) -> str:
    options = hv.Store.lookup_options("bokeh", shown._plots["map"], "plot").kwargs
    return str(options["title"])


def test_the_map_is_not_drawn_again_while_it_stays() -> None:
    shown = explorer()
    before = shown._plots["map"]
    shown.widgets["tile"].value = 128
    assert shown._plots["map"] is before
    assert plot_map(shown.data) is not before


# Controls ---------------------------------------------------------------------------------------


def test_steps_are_taken_back_one_by_one() -> None:
    shown = explorer()
    first = shown.state
    shown.widgets["gpus"].value = 96
    shown.widgets["weak"].value = True
    assert (shown.state.gpus, shown.state.weak) == (96, True)
    shown.undo()
    assert (shown.state.gpus, shown.state.weak) == (96, False)
    shown.undo()
    assert shown.state == first
    assert shown.widgets["gpus"].value == 48
    shown.widgets["strategy"].value = "pipeline"
    shown.reset()
    assert shown.state == first


def test_a_smaller_machine_ends_the_slider() -> None:
    shown = explorer()
    shown.widgets["machine"].value = "p40"
    assert shown.message == ""
    assert (shown.state.gpus, shown.widgets["gpus"].value) == (8, 8)
    assert max(shown.widgets["gpus"].options) == 8
    shown.widgets["machine"].value = "one-h200"
    assert (shown.state.gpus, shown.widgets["gpus"].options) == (1, (1,))
    shown.undo()
    shown.undo()
    assert shown.state == STATE
    assert max(shown.widgets["gpus"].options) == 6144


@pytest.mark.parametrize(
    ("control", "value", "words"),
    [("levels", 8, "stride 128"), ("tile", 1024, "512")],
)
def test_what_cannot_be_is_said_and_the_view_kept(control: str, value: int, words: str) -> None:
    shown = explorer()
    data = shown.data
    shown.widgets[control].value = value
    assert words in shown.message
    assert shown.state == STATE
    assert shown.data is data


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"gpus": 0}, SpecError),
        ({"gpus": 10**6}, PlanError),
        ({"images": True}, SpecError),
        ({"image": 4.5}, SpecError),
        ({"machine": "summit2"}, PlanError),
        ({"strategy": "luck"}, PlanError),
    ],
)
def test_bad_values_are_refused(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        explorer(**changes)
    with pytest.raises(ShapeError):
        ScalingExplorer(SPEC, TrainSpec(tile=66), image=512)


# Exports ----------------------------------------------------------------------------------------


def test_exports_are_loaded_again(tmp_path: Path) -> None:
    shown = explorer(strategy="tiles-x-stages", weak=True)
    files = shown.exports()
    other = ScalingExplorer()
    other.load(files["ScalingExplorer.yaml"])
    assert other.state == shown.state
    content = yaml.safe_load(files["ScalingExplorer.yaml"])
    assert UNetSpec.from_dict(content["spec"]) == SPEC
    lines = list(csv.DictReader(io.StringIO(files["ScalingExplorer.csv"])))
    (line,) = [r for r in lines if (r["strategy"], r["gpus"]) == ("tiles-x-stages", "48")]
    now = shown.data.sel(strategy="tiles-x-stages", gpus=48)
    assert float(line["step_seconds"]) == float(now["step_seconds"])
    assert float(line["bubble seconds"]) == float(now["seconds"].sel(term="bubble"))
    plan = Plan.from_yaml(files["plan.yaml"])
    assert plan == shown.plan
    third = explorer()
    third.load(files["plan.yaml"])
    assert third.message == ""
    assert (third.state.spec, third.state.gpus) == (SPEC, plan.num_ranks)


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_the_best_choice_is_a_job(name: str, tmp_path: Path) -> None:
    setting = ScalingSetting()
    most = gpu_stops(MACHINES[name])[-1]
    state = dataclasses.replace(STATE, machine=name, gpus=min(12, most))
    plan = best_plan(setting, state)
    assert plan is not None
    job = job_of(setting, state, plan)
    assert job.num_ranks == plan.num_ranks <= state.gpus
    choice = choice_of(setting, state)
    assert isinstance(choice, Choice)
    runs = choice.best if choice.strategy != "halo-exchange" else choice.runner_up
    assert runs is not None
    assert (plan.train.tile, plan.num_stages) == (runs.tile, runs.stages or 1)
    # The command that is shown writes the very script that is saved.
    shown = explorer(machine=name, gpus=state.gpus)
    command = shown._command.value.partition(">")[2].partition("<")[0].split()
    assert command[:3] == ["bigunet", "launch", "plan.yaml"]
    (tmp_path / "plan.yaml").write_text(shown.exports()["plan.yaml"])
    arguments = ["launch", str(tmp_path / "plan.yaml"), "--dry-run", *command[3:]]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    written = done.output.replace(str(tmp_path / "plan.yaml"), "plan.yaml")
    assert written.strip() == run_script(setting, state, plan).strip()


def test_a_pipeline_s_cuts_are_those_of_the_prediction() -> None:
    """Of a network that only fits in stages, the plan has the stages that were predicted."""
    wide = UNetSpec(levels=5, channels=24)
    setting = ScalingSetting()
    state = ScalingState(wide, TrainSpec(tile=512), 512, 4, machine="p40", gpus=4)
    choice = choice_of(setting, state)
    assert isinstance(choice, Choice)
    for candidate, outcome in (
        (choice.best, choice.outcome), (choice.runner_up, choice.runner_up_outcome)
    ):  # fmt: skip
        assert candidate is not None
        assert outcome is not None
        if candidate.stages is None:
            continue
        only = dataclasses.replace(choice, best=candidate, outcome=outcome)
        setting._choices[state] = only
        plan = best_plan(setting, state)
        assert plan is not None
        assert (plan.num_stages, plan.micro_batches) == (candidate.stages, candidate.micro_batches)
        assert plan.tiles == outcome.pipelines
        assert plan.stages[-1][1] == layer_table(wide, plan.shape_BCHW)[-1].name


def test_a_plan_of_one_stage_a_rank_trains(tmp_path: Path) -> None:
    """Sample-parallel as a plan: two ranks, started from the saved file."""
    small = UNetSpec(levels=2, channels=4, classes=5)
    state = ScalingState(small, TrainSpec(tile=64, steps=1), 128, 2, machine="p40", gpus=2)
    setting = ScalingSetting()
    found = choice_of(setting, state)
    assert isinstance(found, Choice)
    tiled = found.best._replace(strategy="sample-parallel", tile=64, stages=None)
    setting._choices[state] = dataclasses.replace(found, best=tiled)
    plan = best_plan(setting, state)
    assert plan is not None
    assert (plan.num_stages, plan.tiles) == (1, 2)
    plan.save(tmp_path / "plan.yaml")
    done = subprocess.run(
        [sys.executable, "-m", "bigunet", "train", "synthetic:128x128:1", "--plan",
         str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "run"), "--quiet"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "run").rglob("*.safetensors"))


def test_a_saved_measurement_is_laid_over(tmp_path: Path) -> None:
    save_scaling(measured(), tmp_path / "s.nc")
    shown = explorer(measured=load_scaling(tmp_path / "s.nc"))
    assert shown.data["measured_gpus"].values.tolist() == [1, 2]
