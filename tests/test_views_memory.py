"""MemoryExplorer as data: state in, tables out, bars and limits where they should be."""

from __future__ import annotations

import csv
import io
import json
import re
from itertools import pairwise
from pathlib import Path

import holoviews as hv
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from bigunet.cli import app
from bigunet.errors import ShapeError, SpecError
from bigunet.layers import count_parameters
from bigunet.memory import peak_bytes, static_bytes
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import tile_image
from bigunet.views import MemoryExplorer, MemoryState, memory_by_depth
from bigunet.views.colours import GREY, TEXT
from bigunet.views.memory import largest_read, memory_tables
from bigunet.views.memory_plots import COLOURS, plot_layers, plot_step, size

GIB = 2**30
SPEC = UNetSpec(levels=3, channels=16)
MANY = UNetSpec(levels=6, convs=6, channels=8)


def bars(plot: hv.Overlay) -> list[tuple[float, float, float, float, str]]:
    found = next(part for part in plot if isinstance(part, hv.Rectangles))
    return list(zip(*(found.dimension_values(i) for i in range(5)), strict=True))


def texts(plot: hv.Overlay) -> list[str]:
    found = next(part for part in plot if isinstance(part, hv.Labels))
    return [str(text) for text in found.dimension_values(2)]


def hatches(plot: hv.Overlay) -> int:
    return len(next(part for part in plot if isinstance(part, hv.Segments)))


def limit_line(plot: hv.Overlay) -> list[float]:
    """Height of the heavy line."""
    return [(y0 + y1) / 2 for x0, y0, _, y1, colour in bars(plot) if colour == TEXT]


@pytest.mark.parametrize(
    ("side", "tile", "levels"),
    [
        (256, 64, 3),
        (250, 64, 3),
        (100, 64, 3),
        (130, 64, 4),
        (999, 96, 4),
        (64, 64, 3),
    ],
)
def test_the_tile_is_the_one_of_the_image_that_reads_most(
    side: int, tile: int, levels: int
) -> None:
    spec = UNetSpec(levels=levels, channels=4)
    found = largest_read(side, tile, spec)
    areas = [t.read.area for t in tile_image((side, side), tile, spec)]
    if found is None:
        assert len(areas) == 1
    else:
        assert len(areas) > 1
        assert found.read.area == max(areas)


def test_tables_are_those_of_the_model() -> None:
    state = MemoryState(SPEC, TrainSpec(batch=3), 512, 64, "A100-40GB")
    data = memory_tables(state)
    tile = largest_read(512, 64, SPEC)
    assert tile is not None
    shape = (3, 3, *tile.read.shape)
    assert (
        int(data.peak[0]) == peak_bytes(SPEC, shape, state.train, tile=tile, device="A100-40GB")[0]
    )
    assert data.attrs["capacity_bytes"] == 40 * GIB
    assert data.attrs["tiles"] == 64
    assert not data.attrs["grouped"]
    assert (data.pile.values == data.held.values).all()
    assert memory_tables(state).identical(data)


def test_many_layers_are_drawn_by_block() -> None:
    data = memory_tables(MemoryState(MANY, TrainSpec(), 256))
    assert data.attrs["grouped"]
    assert data.sizes["layer"] > 60 >= data.sizes["bar"]
    for block in data.bar.values:
        whole = data.held.sel(layer=data.block == block)
        bar = data.pile.sel(bar=block)
        kept = [str(cause) for cause in data.cause.values if cause != "temporaries"]
        assert (bar.sel(cause=kept) == whole.sel(cause=kept).sum("layer")).all()
        assert int(bar.sel(cause="temporaries")) == int(whole.sel(cause="temporaries").max())
    assert (
        f"{data.sizes['layer']} layers"
        in hv.Store.lookup_options("bokeh", plot_layers(data), "plot").kwargs["title"]
    )


@pytest.mark.parametrize("spec", [SPEC, MANY])
def test_the_pile_holds_every_byte_once(spec: UNetSpec) -> None:
    data = memory_tables(MemoryState(spec, TrainSpec(), 1024, device="V100-16GB"))
    plot = plot_layers(data)
    for cause, colour in COLOURS.items():
        # One more bar of each colour is the legend's.
        heights = [y1 - y0 for x0, y0, x1, y1, c in bars(plot) if c == colour]
        expected = float(data.held.sel(cause=cause).sum()) / GIB
        if cause == "temporaries":
            assert not heights
        elif expected:
            assert sum(heights[:-1]) == pytest.approx(expected, rel=1e-9)
            assert f"{cause} {size(expected * GIB)}" in texts(plot)


def test_the_step_ends_at_the_peak_and_marks_it() -> None:
    for spec, recompute in ((SPEC, "none"), (MANY, "block")):
        train = TrainSpec(recompute=recompute)
        data = memory_tables(MemoryState(spec, train, 512))
        plot = plot_step(data)
        peak = int(data.peak[0]) / GIB
        mark = bars(plot)[-1]
        assert (mark[1] + mark[3]) / 2 == pytest.approx(peak)
        drawn = [bar for bar in bars(plot)[:-1] if bar[4] in set(COLOURS.values()) - {GREY}]
        assert max(bar[3] for bar in drawn) == pytest.approx(peak)
        # Under the mark the bars reach its height.
        x = (mark[0] + mark[2]) / 2
        assert max(b[3] for b in drawn if b[0] <= x <= b[2]) == pytest.approx(peak)
        name = f"peak {size(peak * GIB)}: {data.attrs['peak_phase']}, {data.attrs['peak_layer']}"
        assert name in texts(plot)
        ticks = hv.Store.lookup_options("bokeh", plot, "plot").kwargs["xticks"]
        back = "backward" if recompute == "none" else "recompute and backward"
        assert [text for _, text in ticks] == ["forward", "loss", back, "optimiser"]


def test_bars_stand_on_each_other_without_gaps() -> None:
    data = memory_tables(MemoryState(SPEC, TrainSpec(), 512))
    found = bars(plot_step(data))[:-1]
    total = data.live.sum("cause").values / GIB
    for moment in (0, 7, len(total) // 2, len(total) - 1):
        column = [b for b in found if b[0] <= moment + 0.5 <= b[2] and b[4] in COLOURS.values()]
        column = sorted(b for b in column if b[4] != GREY)
        edges = sorted((b[1], b[3]) for b in column)
        assert edges[0][0] == 0
        assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(edges))
        assert edges[-1][1] == pytest.approx(total[moment])


@pytest.mark.parametrize(
    ("image", "device", "over", "drawn"),
    [
        (10_000, "V100-16GB", True, True),
        (2048, "V100-16GB", False, False),
        (4096, "P40", False, True),
    ],
)
def test_the_limit_is_drawn_and_what_exceeds_it_hatched(
    image: int, device: str, over: bool, drawn: bool
) -> None:
    explorer = MemoryExplorer(SPEC, image=image, device=device)
    plots = explorer.plots(explorer.data)
    capacity = explorer.data.attrs["capacity_bytes"] / GIB
    for plot in plots.values():
        assert limit_line(plot) == ([pytest.approx(capacity)] if drawn else [])
        assert (hatches(plot) > 0) == over
        assert any(f"limit of {device}, {capacity:,.1f} GiB" in text for text in texts(plot))
        assert any("above this plot" in text for text in texts(plot)) != drawn
    text = explorer.summary(explorer.data)
    peak = int(explorer.data.peak[0]) / GIB
    used = f"{peak:,.1f} / {capacity:,.1f} GiB ({100 * peak / capacity:,.0f} %) of {device}"
    assert text.startswith(used)
    assert ("OVER BUDGET" in text) == over


def test_controls_change_the_state_and_everything_that_follows() -> None:
    explorer = MemoryExplorer(SPEC, image=512)
    new = {
        "levels": 4, "convs": 3, "channels": 24, "image": 1024, "tile": 256, "batch": 2,
        "precision": "bf16", "optimiser": "sgd", "recompute": "block", "device": "H200",
    }  # fmt: skip
    assert list(explorer.widgets) == list(new)
    for name, value in new.items():
        before = explorer._summary.value + explorer._table.value + explorer._links.value
        explorer.widgets[name].value = value
        assert explorer.values(explorer.state)[name] == value
        assert explorer._summary.value + explorer._table.value + explorer._links.value != before
        assert explorer.message == ""
    assert explorer.state.train.tile == 256
    header, *rows = explorer.rows(explorer.data)
    assert header[0] == "cause"
    shares = [float(str(row[2]).removesuffix(" %")) for row in rows[:-1]]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=0.3)


def live(explorer: MemoryExplorer) -> list[object]:
    """What the page is sent of each figure: columns, title, ticks, axes."""
    found: list[object] = []
    for figure in (explorer._figures[name]._model for name in ("layers", "step")):
        for renderer in figure.renderers:
            source = renderer.data_source.data
            found.append({name: np.asarray(source[name]).tolist() for name in source})
        axis = figure.xaxis[0]
        found += [figure.title.text, axis.ticker.ticks, axis.major_label_overrides]
        found += [(r.start, r.end) for r in (figure.x_range, figure.y_range)]
    return found


def test_a_live_figure_becomes_what_a_new_one_is() -> None:
    explorer = MemoryExplorer(SPEC, image=512)
    explorer.live = True
    for state in (
        MemoryState(UNetSpec(), TrainSpec(recompute="block"), 10_000),
        MemoryState(MANY, TrainSpec(optimiser="sgd"), 256, 64, "H200"),
        MemoryState(SPEC, TrainSpec(precision="bf16"), 1000, 0, "here"),
    ):
        explorer.show(state)
        new = MemoryExplorer(
            state.spec, state.train, image=state.image, tile=state.tile, device=state.device
        )
        assert live(explorer) == live(new)


def test_a_remedy_does_what_it_promises() -> None:
    """Set in the explorer, each brings the peak that it was listed with."""
    moves = {
        "recompute": ("recompute", "block"),
        "bf16 autocast": ("precision", "bf16-autocast"),
        "bf16": ("precision", "bf16"),
        "SGD": ("optimiser", "sgd"),
        "batch of 1": ("batch", 1),
    }
    start = MemoryExplorer(UNetSpec(channels=16), TrainSpec(batch=2), image=1024, device="P40")
    listed = {
        str(name): int(after)
        for name, after in zip(start.data.remedy.values, start.data.after.values, strict=True)
    }
    assert set(moves) <= set(listed)
    for name, (control, value) in moves.items():
        other = MemoryExplorer(UNetSpec(channels=16), TrainSpec(batch=2), image=1024, device="P40")
        other.widgets[control].value = value
        assert int(other.data.peak[0]) == listed[name]
        assert int(start.data.saved.sel(remedy=name)) == int(start.data.peak[0]) - listed[name]


def test_the_smaller_tile_fits_and_the_next_does_not() -> None:
    explorer = MemoryExplorer(UNetSpec(), image=10_000, device="V100-16GB")
    assert str(explorer.data.remedy.values[0]) == "smaller tile"
    side = int(re.match(r"\d+", str(explorer.data.change.values[0]))[0])  # type: ignore[index]
    explorer.widgets["tile"].value = side
    assert "fits" in explorer.summary(explorer.data)
    explorer.widgets["tile"].value = side + 16
    assert "OVER BUDGET" in explorer.summary(explorer.data)
    table = explorer.more_tables(explorer.data)
    assert len(table) == 1
    header, *rows = next(iter(table.values()))
    assert header[2:] == ["saves", "time", "then"]
    assert [row[0] for row in rows] == list(explorer.data.remedy.values)


def test_exports_load_again_here_and_on_the_command_line(tmp_path: Path) -> None:
    explorer = MemoryExplorer(
        UNetSpec(levels=3, channels=8, norm="batch"),
        TrainSpec(precision="bf16-autocast", batch=2),
        image=2048,
        tile=128,
        device="A100-40GB",
    )
    files = explorer.exports()
    other = MemoryExplorer()
    other.load(files["MemoryExplorer.yaml"])
    assert other.state == explorer.state
    content = yaml.safe_load(files["MemoryExplorer.yaml"])
    assert UNetSpec.from_dict(content["spec"]) == explorer.state.spec
    path = tmp_path / "plan.yaml"
    path.write_text(files["MemoryExplorer.yaml"])
    options = ["--spec", str(path), "--train", str(path), "--tiled", "--device", "A100-40GB"]
    done = CliRunner().invoke(app, ["memory", *options, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["peak_bytes"] == int(explorer.data.peak[0])
    header, *rows = csv.reader(io.StringIO(files["MemoryExplorer.csv"]))
    assert header[:2] == ["layer", "block"]
    assert [row[0] for row in rows] == list(explorer.data.layer.values)
    assert (
        np.array([row[2:] for row in rows], np.int64).tolist() == explorer.data.held.values.tolist()
    )


BAD_STATES = [
    "{spec: {levels: 3}}",
    "{spec: 1, train: 2, image: 3, tile: 4, device: here}",
    "{spec: {}, train: {}, image: 512, tile: 0, device: K80}",
    "{spec: {}, train: {}, image: large, tile: 0, device: here}",
    "{spec: {}, train: {}, image: 512, tile: -16, device: here}",
    "{spec: {}, train: {optimiser: lion}, image: 512, tile: 0, device: here}",
]


def test_a_state_that_cannot_be_is_refused_and_the_last_kept() -> None:
    explorer = MemoryExplorer(SPEC, image=512)
    before = explorer.data
    for state in BAD_STATES:
        with pytest.raises(SpecError):
            explorer.load(f"explorer: MemoryExplorer\nversion: 1\nstate: {state}")
        assert explorer.data is before


def test_a_wrong_combination_is_said_and_the_last_view_kept() -> None:
    explorer = MemoryExplorer(UNetSpec(levels=5, channels=8), tile=144, image=1024)
    before = explorer.data
    explorer.widgets["levels"].value = 8
    assert "stride 128" in explorer.message
    assert explorer.data is before
    explorer.widgets["tile"].value = 0
    assert explorer.message == ""
    assert explorer.state.spec.levels == 8
    assert largest_read(60, 64, SPEC) is None
    with pytest.raises(ShapeError):
        largest_read(1024, 102, SPEC)
    with pytest.raises(SpecError):
        MemoryExplorer(device="K80")


def test_depth_doubles_parameters_and_hardly_adds_activations() -> None:
    train = TrainSpec()
    found = memory_by_depth(UNetSpec(), (1, 3, 256, 256), train, range(1, 8))
    for levels in (1, 4, 7):
        spec = UNetSpec(levels=levels)
        line = found.sel(levels=levels)
        assert float(line.parameters) == 4 * count_parameters(spec) / GIB
        both = float(line.parameters + line.gradients_and_optimiser)
        assert both == static_bytes(spec, train) / GIB
    ahead = found.parameters > found.activations
    assert found.levels.values[ahead.values].tolist() == [6, 7]
