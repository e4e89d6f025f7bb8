"""What holds of every explorer alike: files in and out, words for what cannot be, order of work."""

from __future__ import annotations

import asyncio
import base64
import io
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
import yaml
from ipywidgets.widgets.widget_upload import Bunch
from PIL import Image

from bigunet.errors import PlanError
from bigunet.plan import Plan
from bigunet.scenes import ClassTable
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.views import (
    Explorer,
    HaloExplorer,
    MemoryExplorer,
    MosaicViewer,
    ScalingExplorer,
    StageExplorer,
)

SPEC = UNetSpec(levels=3, channels=4)


def mosaic() -> MosaicViewer:
    generator = np.random.default_rng(0)
    image = generator.integers(0, 256, (3, 160, 200)).astype(np.uint8)
    labels = generator.integers(0, 2, (160, 200)).astype(np.uint8)
    return MosaicViewer(image, labels, labels, classes=ClassTable(("a", "b")), spec=SPEC, tile=32)


def stages() -> StageExplorer:
    return StageExplorer(SPEC, (4, 3, 64, 64), stages=3, micro_batches=2)


def scaling() -> ScalingExplorer:
    return ScalingExplorer(SPEC, TrainSpec(tile=64), image=512, images=4, machine="p40")


MAKE: dict[str, Callable[[], Explorer[Any]]] = {
    "HaloExplorer": lambda: HaloExplorer(SPEC, tile=64),
    "MemoryExplorer": lambda: MemoryExplorer(SPEC, image=512, tile=64),
    "MosaicViewer": mosaic,
    "ScalingExplorer": scaling,
    "StageExplorer": stages,
}
# A control and values for it.
STEPS = {
    "HaloExplorer": ("levels", (4, 2)),
    "MemoryExplorer": ("channels", (9, 5)),
    "MosaicViewer": ("opacity", (0.2, 0.4)),
    "ScalingExplorer": ("gpus", (4, 2)),
    "StageExplorer": ("cut1", (4, 2)),
}


@pytest.fixture(params=list(MAKE))
def explorer(request: pytest.FixtureRequest) -> Explorer[Any]:
    return MAKE[request.param]()


def upload(explorer: Explorer[Any], text: str) -> None:
    """What choosing a file on the page does."""
    content = memoryview(text.encode())
    file = Bunch(name="f", type="", size=0, content=content, last_modified=datetime.now(UTC))
    explorer._upload.value = (file,)


def step(explorer: Explorer[Any], index: int) -> None:
    name, values = STEPS[type(explorer).__name__]
    explorer._last_change = ("", 0.0)
    explorer.widgets[name].value = values[index]


def test_controls_pictures_tables_and_files_are_there(explorer: Explorer[Any]) -> None:
    name = type(explorer).__name__
    for widget in explorer.widgets.values():
        assert widget.description
        assert widget.tooltip
    assert "<caption>" in explorer._table.value
    assert 'role="status" aria-live="polite"' in explorer._summary.value
    bundle = explorer._repr_mimebundle_()
    assert Image.open(io.BytesIO(base64.b64decode(bundle["image/png"]))).width > 400
    assert explorer.summary(explorer.data) in bundle["text/plain"]
    step(explorer, 0)
    state = explorer.state
    exported = explorer.exports()
    assert {f"{name}.yaml", f"{name}.csv"} <= set(exported)
    again = MAKE[name]()
    upload(again, exported[f"{name}.yaml"])
    assert again.message == ""
    assert again.state == state
    assert {n: w.value for n, w in again.widgets.items()} == {
        n: w.value for n, w in explorer.widgets.items()
    }
    again.undo()
    assert again.state == MAKE[name]().state


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2",
        "\x00\x01",
        "just words",
        "explorer: {name}\nversion: 2\nstate: {{}}",
        "explorer: Another\nversion: 1\nstate: {{}}",
        "explorer: {name}\nversion: 1\nstate: [1]",
        "explorer: {name}\nversion: 1\nstate: {{unknown: 1}}",
        "explorer: {name}\nversion: 1\nstate: {{1: 2}}",
        "bigunet_plan: 99",
        "bigunet_plan: 1\nstages: [[a, b]]",
    ],
)
def test_a_file_that_is_none_is_said_and_the_view_kept(explorer: Explorer[Any], text: str) -> None:
    state, data, plots = explorer.state, explorer.data, explorer._plots
    upload(explorer, text.format(name=type(explorer).__name__))
    assert explorer.message
    assert 'role="alert"' in explorer._message.value
    assert explorer.state == state
    assert explorer.data is data
    assert explorer._plots is plots
    # The controls work on.
    step(explorer, 0)
    assert explorer.message == ""
    assert explorer.state != state


@pytest.mark.parametrize("wrong", [-1, "x", None, [1], 1e400, {"a": 1}])
def test_no_field_of_an_export_brings_more_than_words(
    explorer: Explorer[Any], wrong: object
) -> None:
    name = type(explorer).__name__
    content = yaml.safe_load(explorer.exports()[f"{name}.yaml"])
    state = explorer.state
    for field in content["state"]:
        changed = {**content, "state": {**content["state"], field: wrong}}
        upload(explorer, yaml.safe_dump(changed))
        if explorer.message:
            assert explorer.state == state
        explorer.show(state)


@pytest.mark.parametrize(
    ("name", "control", "value", "words"),
    [
        ("HaloExplorer", "levels", 8, "stride 128"),
        ("MemoryExplorer", "levels", 8, "stride 128"),
        ("MemoryExplorer", "tile", 66, "stride 4"),
        ("ScalingExplorer", "levels", 8, "stride 128"),
    ],
)
def test_what_cannot_be_is_said_and_undo_takes_the_controls_back(
    name: str, control: str, value: object, words: str
) -> None:
    explorer = MAKE[name]()
    state, data, before = explorer.state, explorer.data, explorer.widgets[control].value
    if control == "tile":
        explorer.widgets[control].step = 1
    explorer.widgets[control].value = value
    assert words in explorer.message
    assert explorer.state == state
    assert explorer.data is data
    assert not explorer._undo_button.disabled
    explorer.undo()
    assert explorer.widgets[control].value == before
    assert (explorer.message, explorer.state) == ("", state)
    assert explorer._undo_button.disabled


def test_more_stages_than_layers_cannot_be_asked_for() -> None:
    small = StageExplorer(UNetSpec(levels=1, convs=1, channels=2), (2, 3, 16, 16), stages=1)
    most = small.widgets["stages"].max
    assert most == min(12, len(small.setting.table))
    content = yaml.safe_load(small.exports()["StageExplorer.yaml"])
    content["state"]["cuts"] = list(range(1, len(small.setting.table) + 1))
    upload(small, yaml.safe_dump(content))
    assert "cuts rise" in small.message
    assert small.state.num_stages == 1


def test_the_viewer_refuses_a_tile_off_the_stride() -> None:
    image = np.zeros((3, 64, 64), np.uint8)
    viewer = MosaicViewer(image, spec=UNetSpec(levels=9), tile=256)
    before = viewer.state
    viewer.widgets["tile"].value = 128
    assert "stride 256" in viewer.message
    assert viewer.state == before


def test_texts_follow_the_picture_where_a_loop_runs(explorer: Explorer[Any]) -> None:
    order: list[str] = []

    def noted(name: str) -> None:
        plain = getattr(explorer, name)
        setattr(explorer, name, lambda *a, **k: (order.append(name), plain(*a, **k))[1])

    for name in ("_draw", "_write_texts", "details"):
        noted(name)

    async def run() -> None:
        before = explorer._summary.value
        step(explorer, 0)
        step(explorer, 1)
        assert order == ["_draw", "_draw"]
        assert explorer._summary.value == before
        await asyncio.sleep(0.3)

    asyncio.run(run())
    # Once for both changes, and what they need besides is computed then.
    assert order == ["_draw", "_draw", "_write_texts", "details"]
    assert explorer.summary(explorer.data).split(";")[0][:20] in explorer._summary.value
    # A loop that has ended leaves nothing waiting.
    step(explorer, 0)
    assert order[-2:] == ["_write_texts", "details"]


def test_quick_drawing_ends_where_a_new_explorer_begins(explorer: Explorer[Any]) -> None:
    explorer._draw_anew = lambda names: pytest.fail("drawn by HoloViews")  # type: ignore[method-assign]
    step(explorer, 0)
    other = MAKE[type(explorer).__name__]()
    other.show(explorer.state)
    other._draw_anew(list(other._plots))
    for name, figure in explorer._figure_of.items():
        wanted = other._figure_of[name]
        assert figure.title.text == wanted.title.text
        for mine, its in zip(figure.renderers, wanted.renderers, strict=True):
            assert set(mine.data_source.data) == set(its.data_source.data)
            for column, values in its.data_source.data.items():
                np.testing.assert_array_equal(mine.data_source.data[column], values)


def plan(spec: UNetSpec = SPEC) -> Plan:
    return StageExplorer(spec, (4, 3, 64, 64), stages=4, micro_batches=4).plan


def test_plans_are_shown() -> None:
    text = plan().to_yaml()
    shown = stages()
    upload(shown, text)
    assert shown.message == ""
    assert shown.plan == plan()
    folded = shown.plan
    shown.show(shown.balanced("folded"))
    other = stages()
    upload(other, (folded := shown.plan).to_yaml())
    assert other.plan == folded
    halo = HaloExplorer(tile=64)
    upload(halo, text)
    assert halo.state.spec == SPEC
    memory = MemoryExplorer()
    upload(memory, text)
    assert memory.message == ""
    assert (memory.state.spec, memory.state.image, memory.state.train.batch) == (SPEC, 64, 4)
    scaled = scaling()
    upload(scaled, text)
    assert scaled.message == ""
    assert (scaled.state.strategy, scaled.state.gpus) == ("pipeline", 4)


def test_plans_that_cannot_be_shown_are_refused_in_words() -> None:
    other = plan(UNetSpec(levels=2, channels=4)).to_yaml()
    shown = stages()
    upload(shown, other)
    assert "network" in shown.message
    upload(shown, re.sub(r"^bigunet_plan: .*", "bigunet_plan: 99", plan().to_yaml(), flags=re.M))
    assert "version" in shown.message
    with pytest.raises(PlanError, match="shows no plans"):
        mosaic().load(other)
    wide = StageExplorer(SPEC, (2, 3, 64, 32), train=TrainSpec(batch=2), stages=2).plan
    with pytest.raises(PlanError, match="square"):
        MemoryExplorer().load(wide.to_yaml())
