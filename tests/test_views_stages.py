"""StageExplorer as data: states, tables, plots and widgets, without a browser."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import holoviews as hv
import ipywidgets as widgets
import numpy as np
import pytest
import xarray as xr

from bigunet.comparison import compare_plans
from bigunet.cost import RooflineCost
from bigunet.errors import PlanError, SpecError
from bigunet.layers import layer_table
from bigunet.machines import machine
from bigunet.plan import Plan
from bigunet.simulate import simulate, stages_table
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.stage_memory import row_memory
from bigunet.views import StageExplorer, StageState
from bigunet.views.stage_tables import moved_cut

SPEC = UNetSpec(levels=4, channels=8)
SHAPE = (8, 3, 128, 128)
SUMMIT = machine("summit")
ROWS = len(layer_table(SPEC, SHAPE))
COST = RooflineCost(SUMMIT.processor)


@pytest.fixture
def explorer() -> StageExplorer:
    return StageExplorer(SPEC, SHAPE, stages=3)


def set_apart(explorer: StageExplorer, name: str, value: object) -> None:
    """A change that is a step of its own for "Undo"."""
    explorer._last_change = ("", 0.0)
    explorer.widgets[name].value = value


def part(plot: hv.Overlay, kind: type) -> list[tuple[Any, ...]]:
    (found,) = [p for p in plot if type(p) is kind]
    count = {hv.Rectangles: 5, hv.Segments: 5, hv.Labels: 3}[kind]
    return list(zip(*(found.dimension_values(i) for i in range(count)), strict=True))


def texts(plot: hv.Overlay) -> str:
    return "\n".join(str(row[2]) for row in part(plot, hv.Labels))


def buttons(widget: Any) -> Iterator[Any]:
    if isinstance(widget, widgets.Button):
        yield widget
    for child in getattr(widget, "children", ()):
        yield from buttons(child)


def click(explorer: StageExplorer, text: str) -> None:
    (button,) = [b for b in buttons(explorer.view) if b.description == text]
    button.click()


# Tables -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", ["none", "block", "except_last"])
def test_tables_are_those_of_the_simulator(schedule: Any, recompute: Any) -> None:
    train = TrainSpec(recompute=recompute)
    explorer = StageExplorer(SPEC, SHAPE, train=train, stages=3, schedule=schedule, micro_batches=4)
    data, plan = explorer.data, explorer.plan
    assert plan.schedule == schedule
    assert plan.train.recompute == recompute
    step = simulate(plan, COST, SUMMIT, memory=row_memory(SPEC))
    assert data.attrs["step_seconds"] == step.attrs["step_seconds"]
    np.testing.assert_array_equal(data["end"], step["end"])
    for i, row in enumerate(stages_table(plan, COST, SUMMIT, memory=row_memory(SPEC))):
        names = [str(n) for n in data["layer"].values[data["stage_of"].values == i]]
        assert (names[0], names[-1], len(names)) == (row["first"], row["last"], row["num_layers"])
        assert float(data["forward"][i]) == pytest.approx(row["forward_seconds"], rel=1e-12)
        assert float(data["backward"][i]) == pytest.approx(row["backward_seconds"], rel=1e-12)
        assert int(data["sends"][i]) == row["send_bytes"]
        assert int(data["peak"][i]) == row["peak_bytes"]
    total = (data["forward"] + data["backward"]).sum() - data["layer_seconds"].sum()
    again = float(data["forward"].sum()) if recompute == "block" else 0.0
    assert float(total) == pytest.approx(again, abs=1e-12)


def test_skips_are_counted_by_the_links_they_take(explorer: StageExplorer) -> None:
    names = [row.name for row in layer_table(SPEC, SHAPE)]
    # One stage ends in the encoder's second level, one in the bottleneck.
    state = StageState((names.index("skip1"), names.index("mid_conv1")), 8)
    data = explorer.tables(state)
    stage = {n: int(s) for n, s in zip(names, data["stage_of"].values, strict=True)}
    expected = [abs(stage[f"skip{k}"] - stage[f"cat{k}"]) for k in (2, 1, 0)]
    by_source = sorted(zip(data["skip_source"].values, data["skip_hops"].values, strict=True))
    assert [int(h) for _, h in by_source] == expected[::-1] == [2, 1, 1]
    # 8 channels of 128 x 128 in fp32, twice as many channels at half the side, and so on.
    size = 8 * 128 * 128 * 4
    assert data.attrs["skip_link_bytes"] == 2 * size + size // 2 + size // 4
    shown = texts(explorer.plots(data)["layers"])
    assert f"{size / 1e6:.1f} MB x 2 links" in shown


def test_tables_are_a_pure_function_of_the_state(explorer: StageExplorer) -> None:
    state = StageState((5, 9), 4, schedule="1f1b", machine="h200")
    before = explorer.state
    assert explorer.tables(state).identical(explorer.tables(state))
    assert explorer.state is before


def test_over_the_limit_is_said_and_hatched() -> None:
    tight = StageExplorer(UNetSpec.torchgpipe(6, 72), (256, 3, 192, 192), stages=2, micro_batches=4)
    over = tight.data["device_peak"].values > 16 * 2**30
    assert over.any()
    assert "is OVER by" in tight.summary(tight.data)
    plots = tight.plots(tight.data)
    assert texts(plots["devices"]).count("OVER by") == over.sum()
    roomy = StageExplorer(UNetSpec.torchgpipe(6, 72), (8, 3, 192, 192), stages=2, micro_batches=4)
    assert "every device holds its stages" in roomy.summary(roomy.data)
    assert "OVER" not in texts(roomy.plots(roomy.data)["devices"])
    for name in ("layers", "devices"):
        fine = part(roomy.plots(roomy.data)[name], hv.Segments)
        assert len(part(plots[name], hv.Segments)) > len(fine)


# Cuts -------------------------------------------------------------------------------------------


def test_a_cut_stops_at_its_neighbours() -> None:
    for to in range(-3, 25):
        cuts = moved_cut((4, 9, 15), 1, to, 20)
        assert cuts == (4, min(max(to, 5), 14), 15)
        assert moved_cut((4, 9), 0, to, 20)[0] == min(max(to, 1), 8)
        assert moved_cut((4, 9), 1, to, 20)[1] == min(max(to, 5), 19)


def test_sliders_move_cuts_and_are_moved_by_them(explorer: StageExplorer) -> None:
    first, second = explorer.state.cuts
    explorer.widgets["cut1"].value = first - 2
    assert explorer.state.cuts == (first - 2, second)
    explorer.widgets["cut1"].value = second + 5
    assert explorer.state.cuts == (second - 1, second)
    assert explorer.widgets["cut1"].value == second - 1
    # Against its neighbour it stays where it is.
    explorer.widgets["cut1"].value = second
    assert explorer.widgets["cut1"].value == second - 1
    explorer.undo()
    assert explorer.state.cuts == (first, second)
    assert explorer.widgets["cut1"].value == first


def test_the_number_of_stages_balances_anew_and_shows_its_sliders(explorer: StageExplorer) -> None:
    explorer.widgets["stages"].value = 5
    assert len(explorer.state.cuts) == 4
    shown = [i for i in range(1, 12) if explorer.widgets[f"cut{i}"].layout.display != "none"]
    assert shown == [1, 2, 3, 4]
    assert [explorer.widgets[f"cut{i}"].value for i in shown] == list(explorer.state.cuts)
    seconds = (explorer.data["forward"] + explorer.data["backward"]).values
    # No boundary could be moved to make the slowest stage faster: exact balance.
    slowest = seconds.max()
    for index in range(4):
        for by in (-1, 1):
            cuts = moved_cut(explorer.state.cuts, index, explorer.state.cuts[index] + by, ROWS)
            data = explorer.tables(StageState(cuts, 8))
            assert float((data["forward"] + data["backward"]).max()) >= slowest - 1e-15
    explorer.widgets["stages"].value = 1
    assert explorer.state.cuts == ()
    assert explorer.data.attrs["bubble"] == pytest.approx(0, abs=1e-12)


def test_lines_are_dragged_and_follow(explorer: StageExplorer) -> None:
    spans = explorer._spans
    assert [s.visible for s in spans[:3]] == [True, True, False]
    assert all(s.editable for s in spans)
    first, second = explorer.state.cuts
    spans[0].location = first - 1.4  # as the page reports it, before it snaps
    assert explorer.state.cuts == (first - 1, second)
    assert explorer.widgets["cut1"].value == first - 1
    explorer.widgets["cut2"].value = second + 1
    assert spans[1].location == second + 1
    spans[0].location = second + 40
    assert explorer.state.cuts[0] == second
    explorer.widgets["stages"].value = 2
    assert [s.visible for s in spans[:3]] == [True, False, False]
    assert spans[0].location == explorer.state.cuts[0]
    explorer.undo()
    assert [s.location for s in spans[:2]] == list(explorer.state.cuts)


def test_quick_drawing_shows_what_full_drawing_does(explorer: StageExplorer) -> None:
    explorer.widgets["height"].value = "GiB"
    explorer.widgets["cut1"].value = 3
    explorer.widgets["micro_batches"].value = 4
    explorer.widgets["recompute"].value = "stage"
    other = StageExplorer(SPEC, SHAPE, stages=3)
    other._apply(explorer.state)
    hv_names = {"layers", "devices", "timeline"}
    assert set(explorer._figures) == hv_names
    for name in hv_names:
        one, two = explorer._figures[name]._model, other._figures[name]._model
        assert one.title.text == two.title.text
        assert (one.x_range.end, one.y_range.end) == (two.x_range.end, two.y_range.end)
        for a, b in zip(one.renderers, two.renderers, strict=True):
            for column, values in b.data_source.data.items():
                assert list(a.data_source.data[column]) == list(values), (name, column)


# Ways to cut ------------------------------------------------------------------------------------


def test_buttons_cut_as_the_planner_does(explorer: StageExplorer) -> None:
    compared = compare_plans(
        layer_table(SPEC, SHAPE), COST, spec=SPEC, train=TrainSpec(), machine=SUMMIT,
        num_devices=3, micro_batches=8, memory=row_memory(SPEC),
    )  # fmt: skip
    ways = {entry["way"]: entry for entry in compared}
    for text, way in (
        ("Balance by time", "time"), ("Balance by memory", "memory"),
        ("fairscale's", "fairscale"), ("Folded", "folded"), ("Best", "best"),
    ):  # fmt: skip
        set_apart(explorer, "stages", 2)
        set_apart(explorer, "stages", 3)
        click(explorer, text)
        assert explorer.message == ""
        assert explorer.plan.num_devices == 3
        assert [0, *explorer.state.cuts, ROWS] == ways[way]["cuts"], way
        seconds = explorer.data.attrs["step_seconds"]
        assert seconds == pytest.approx(ways[way]["step_seconds"], rel=1e-9)
        if way == "folded":
            assert explorer.state.placement == "folded"
            assert explorer.data.attrs["skip_link_bytes"] == 0
            assert explorer.widgets["stages"].value == 6
        else:
            assert seconds >= ways["best"]["step_seconds"] * (1 - 1e-9)


def test_a_way_that_does_not_work_is_said() -> None:
    spec = UNetSpec.torchgpipe(6, 72)
    explorer = StageExplorer(spec, (512, 3, 192, 192), stages=2, micro_batches=2)
    before = explorer.state
    click(explorer, "Best")
    assert "GiB" in explorer.message
    assert explorer.state is before


# Exports ----------------------------------------------------------------------------------------


def test_the_plan_and_its_command_are_exported(explorer: StageExplorer) -> None:
    explorer.show(explorer.balanced("best"))
    files = explorer.exports()
    assert set(files) == {"StageExplorer.yaml", "StageExplorer.csv", "plan.yaml", "run.sh"}
    assert Plan.from_yaml(files["plan.yaml"]) == explorer.plan
    assert "--nproc-per-node=3 " in files["run.sh"]
    assert "-m bigunet train scene.tif" in files["run.sh"]
    assert "--plan plan.yaml" in files["run.sh"]
    for label in ("Save plan", "Save command", "Save YAML", "Save CSV"):
        assert label in explorer._links.value
    assert "nproc-per-node=3" in explorer._command.value
    twice = StageExplorer(SPEC, SHAPE, stages=2, tiles=2)
    assert "nproc-per-node=4" in twice.exports()["run.sh"]


def test_a_state_loads_again_and_what_is_none_is_refused(explorer: StageExplorer) -> None:
    explorer.show(explorer.balanced("folded"))
    text = explorer.exports()["StageExplorer.yaml"]
    other = StageExplorer(SPEC, SHAPE, stages=2)
    other.load(text)
    assert other.state == explorer.state
    before = other.state
    bad = {
        text.replace("channels: 8", "channels: 9"): SpecError,
        text.replace("micro_batches: 8", "micro_batches: 3"): PlanError,
        text.replace("machine: summit", "machine: abacus"): PlanError,
        text.replace("height: ms", "height: furlongs"): SpecError,
        text.replace(f"- {explorer.state.cuts[0]}\n", "- 40\n", 1): SpecError,
        text.replace(f"- {explorer.state.cuts[0]}\n", "- early\n", 1): SpecError,
    }
    assert text not in bad
    for wrong, kind in bad.items():
        with pytest.raises(kind):
            other.load(wrong)
        assert other.state is before


def test_more_stages_than_can_be_are_refused() -> None:
    with pytest.raises(SpecError, match="at most 12"):
        StageExplorer(SPEC, SHAPE, stages=13)
    with pytest.raises(PlanError, match="1 to 3"):
        StageExplorer(UNetSpec(levels=1, convs=1), (2, 3, 16, 16), stages=5)


# Runs -------------------------------------------------------------------------------------------


def timeline(plan: Plan) -> xr.Dataset:
    """A run that took twice as long as is predicted, in the form that the engines report."""
    step = simulate(plan, COST, SUMMIT)
    kept = step.isel(action=step["kind"].isin(["forward", "backward"]).values)
    names = ["device", "stage", "micro_batch", "kind"]
    data = kept[names].assign(start=2 * kept["start"], end=2 * kept["end"])
    return data.assign_attrs(step_seconds=2 * step.attrs["step_seconds"], machine="measured here")


def test_a_run_is_laid_under_the_prediction() -> None:
    explorer = StageExplorer(SPEC, SHAPE, stages=2, run=timeline)
    bare = len(part(explorer.plots(explorer.data)["timeline"], hv.Rectangles))
    assert bare == 2 * 2 * 8
    first = explorer.state.cuts[0]
    click(explorer, "Run it here")
    assert explorer.message == ""
    assert "2.00 times the prediction" in explorer.summary(explorer.data)
    boxes = part(explorer.plots(explorer.data)["timeline"], hv.Rectangles)
    assert len(boxes) == 2 * bare
    # Summit is not here: drawn to the same length, so both lie at the same times.
    np.testing.assert_allclose([b[0] for b in boxes[:bare]], [b[0] for b in boxes[bare:]])
    # Another cut has no run; coming back, the run is there again.
    explorer.widgets["cut1"].value = first + 1
    assert "measured_seconds" not in explorer.data.attrs
    explorer.widgets["cut1"].value = first
    assert "measured_seconds" in explorer.data.attrs


def test_a_run_leaves_the_kernel_free_and_a_failed_one_is_said() -> None:
    def fails(plan: Plan) -> xr.Dataset:
        raise PlanError("the run works", "no", "Try again.")

    async def in_a_loop(explorer: StageExplorer) -> None:
        click(explorer, "Run it here")
        assert explorer._run_button.disabled
        assert "Running on 2 processes" in explorer.message
        await explorer._waiting_run

    explorer = StageExplorer(SPEC, SHAPE, stages=2, run=timeline)
    asyncio.run(in_a_loop(explorer))
    assert "measured_seconds" in explorer.data.attrs
    assert not explorer._run_button.disabled
    explorer = StageExplorer(SPEC, SHAPE, stages=2, run=fails)
    asyncio.run(in_a_loop(explorer))
    assert "the run works" in explorer.message
    assert not explorer._run_button.disabled


# Pictures and time ------------------------------------------------------------------------------


def test_without_a_comm_the_pictures_follow(explorer: StageExplorer) -> None:
    explorer._go_still()
    before = {name: still.value for name, still in explorer._stills.items()}
    explorer.widgets["cut1"].value += 2
    for name, still in explorer._stills.items():
        assert still.value.startswith("<svg")
        assert still.value != before[name]
    assert len(explorer.png()) > 10_000


def test_a_moved_cut_is_computed_within_the_time_for_it() -> None:
    """285 layers: the kernel's part of the 200 ms from a cut's move to changed pixels."""
    explorer = StageExplorer(UNetSpec.torchgpipe(6, 72), (32, 3, 192, 192), stages=6)
    assert explorer.data.sizes["layer"] == 285
    slider, times = explorer.widgets["cut3"], []
    for _ in range(9):
        began = time.process_time()
        slider.value += 1
        times.append(time.process_time() - began)
    assert median(times) < 0.18
