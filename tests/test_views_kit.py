"""What every explorer can do: undo, reset, export and load, pictures, and life without a comm."""

from __future__ import annotations

import asyncio
import base64
import csv
import io
from typing import Any

import pytest
import yaml
from PIL import Image

from bigunet.errors import SpecError
from bigunet.spec import UNetSpec
from bigunet.views import Explorer, HaloExplorer, HaloState
from bigunet.views import figures as figures_module


@pytest.fixture
def explorer() -> HaloExplorer:
    return HaloExplorer(UNetSpec(levels=3, channels=8), tile=128)


def set_apart(explorer: Explorer[Any], name: str, value: object) -> None:
    """A change that is a step of its own for "Undo"."""
    explorer._last_change = ("", 0.0)
    explorer.widgets[name].value = value


def test_undo_goes_back_step_by_step(explorer: HaloExplorer) -> None:
    first = explorer.state
    assert explorer._undo_button.disabled
    set_apart(explorer, "levels", 4)
    set_apart(explorer, "tile", 256)
    assert not explorer._undo_button.disabled
    explorer.undo()
    assert (explorer.state.spec.levels, explorer.state.tile) == (4, 128)
    assert explorer.widgets["tile"].value == 128
    explorer.undo()
    assert explorer.state == first
    assert explorer.widgets["levels"].value == 3
    assert explorer._undo_button.disabled
    explorer.undo()
    assert explorer.state == first


def test_a_slider_being_dragged_is_one_step(explorer: HaloExplorer) -> None:
    first = explorer.state
    for levels in (4, 5, 6):
        explorer.widgets["levels"].value = levels
    explorer.undo()
    assert explorer.state == first


def test_reset_is_a_step_that_can_be_undone(explorer: HaloExplorer) -> None:
    first = explorer.state
    set_apart(explorer, "levels", 5)
    explorer.reset()
    assert explorer.state == first
    assert explorer.widgets["levels"].value == 3
    explorer.undo()
    assert explorer.state.spec.levels == 5


def test_buttons_do_what_they_say(explorer: HaloExplorer) -> None:
    set_apart(explorer, "levels", 5)
    explorer._undo_button.click()
    assert explorer.state.spec.levels == 3
    set_apart(explorer, "levels", 6)
    explorer._reset_button.click()
    assert explorer.state.spec.levels == 3


def test_every_control_says_what_it_is(explorer: HaloExplorer) -> None:
    for widget in explorer.widgets.values():
        assert widget.description
        assert widget.tooltip


def test_exports_load_again(explorer: HaloExplorer) -> None:
    explorer.show(HaloState(UNetSpec(levels=4, channels=8, up="nearest"), 256))
    files = explorer.exports()
    content = yaml.safe_load(files["HaloExplorer.yaml"])
    assert content["explorer"] == "HaloExplorer"
    assert content["state"]["spec"]["levels"] == 4
    table = list(csv.reader(io.StringIO(files["HaloExplorer.csv"])))
    assert table[0][0] == "block"
    assert len(table) == len(explorer.rows(explorer.data))
    other = HaloExplorer()
    other.load(files["HaloExplorer.yaml"])
    assert other.state == explorer.state
    assert other.widgets["up"].value == "nearest"
    # The links carry these very files.
    for text in files.values():
        assert base64.b64encode(text.encode()).decode() in explorer._links.value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2",
        "just words",
        "explorer: HaloExplorer\nversion: 2\nstate: {}",
        "explorer: StageExplorer\nversion: 1\nstate: {}",
        "explorer: HaloExplorer\nversion: 1",
        "explorer: HaloExplorer\nversion: 1\nstate: {spec: {levels: 3}}",
        "explorer: HaloExplorer\nversion: 1\nstate: {spec: {levels: -1}, tile: 64}",
        "explorer: HaloExplorer\nversion: 1\nstate: {spec: {depth: 3}, tile: 64}",
    ],
)
def test_a_file_that_is_no_export_is_refused(explorer: HaloExplorer, text: str) -> None:
    before = explorer.state
    with pytest.raises(SpecError):
        explorer.load(text)
    assert explorer.state == before


def test_without_a_comm_plots_become_pictures_and_the_fix_is_told(
    explorer: HaloExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures_module, "_TICK_SECONDS", 0.0)
    asyncio.run(explorer._wait_for_handshake())
    assert explorer.live is False
    assert "labextensions" in explorer._notice.value
    assert explorer._plot_box.children == tuple(explorer._stills.values())
    before = {name: still.value for name, still in explorer._stills.items()}
    assert all(text.startswith("<svg") for text in before.values())
    explorer.widgets["levels"].value = 4
    after = {name: still.value for name, still in explorer._stills.items()}
    assert all(before[name] != after[name] for name in before)
    assert "halo 46 pixels" in after["tile"]


def test_a_late_handshake_brings_the_live_plots_back(explorer: HaloExplorer) -> None:
    explorer._go_still()
    explorer.widgets["levels"].value = 5
    model = explorer._figures["tile"]._model
    hear(model)
    assert explorer.live
    assert explorer._notice.value == ""
    assert explorer._plot_box.children == tuple(explorer._figures.values())
    assert model.x_range.end > 128 + 94


def test_with_a_comm_the_waiting_ends(
    explorer: HaloExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures_module, "_TICK_SECONDS", 0.0)
    hear(explorer._figures["work"]._model)
    asyncio.run(explorer._wait_for_handshake())
    assert explorer.live is True
    assert explorer._notice.value == ""


def test_live_figures_follow_the_state(explorer: HaloExplorer) -> None:
    figure = explorer._figures["tile"]._model
    explorer.widgets["tile"].value = 1024
    # The axes hold the read box, 1024 + 2 x 24, and a margin; rows count downwards.
    assert figure.x_range.end > 1048
    assert figure.y_range.start > figure.y_range.end
    right = [source.data["right"] for source in _sources(figure) if "right" in source.data]
    assert any(1024 in list(values) for values in right)


def packed_range(explorer: Explorer[Any], name: str) -> list[float]:
    """The end of the x axis in what a new view on the page reads."""
    (document,) = explorer._figures[name].render_bundle["docs_json"].values()
    wanted = explorer._axes_of[name].x_range.id
    found: list[float] = []
    pending: list[Any] = [document]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if node.get("id") == wanted and "attributes" in node:
                found.append(node["attributes"]["end"])
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)
    return found


def test_a_view_shows_the_state_of_the_moment_it_is_made(explorer: HaloExplorer) -> None:
    figure = explorer._axes_of["tile"]
    assert packed_range(explorer, "tile") == [figure.x_range.end]
    explorer.show(HaloState(UNetSpec(levels=3), 1024))
    assert packed_range(explorer, "tile") != [figure.x_range.end]
    explorer._repr_mimebundle_()
    assert packed_range(explorer, "tile") == [figure.x_range.end]


def hear(figure: Any) -> None:
    """What BokehModel does with the page's first message."""
    for callback in figure._callbacks["inner_width"]:
        callback("inner_width", None, 400)


def _sources(figure: Any) -> list[Any]:
    return [renderer.data_source for renderer in figure.renderers]


def test_the_saved_notebook_keeps_a_picture_and_the_numbers(explorer: HaloExplorer) -> None:
    bundle = explorer._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "halo 22 pixels" in bundle["text/plain"]
    picture = Image.open(io.BytesIO(base64.b64decode(bundle["image/png"])))
    assert picture.format == "PNG"
    assert picture.width > 400
    assert len(picture.getcolors(10**6) or []) > 20


def test_changed_plots_only_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    explorer = HaloExplorer()
    drawn: list[list[str]] = []
    monkeypatch.setattr(explorer, "_draw", lambda names: drawn.append(list(names)))
    kept = explorer._plots
    monkeypatch.setattr(explorer, "plots", lambda data: {**kept, "work": kept["work"].clone()})
    explorer.widgets["levels"].value = 3
    assert drawn == [["work"]]
