"""MosaicViewer as data: what the panes show, at which level, and the numbers beside them."""

from __future__ import annotations

import time

import holoviews as hv
import numpy as np
import pytest

from bigunet.errors import ShapeError
from bigunet.scenes import ClassTable, synthetic
from bigunet.spec import UNetSpec
from bigunet.views import MosaicViewer
from bigunet.views.mosaic_panes import confusion_counts

CLASSES = ClassTable(("water", "field", "road"))
SPEC = UNetSpec(levels=3)


def scene(height: int = 200, width: int = 300) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    image = generator.integers(0, 256, (3, height, width)).astype(np.uint8)
    truth = generator.integers(0, 3, (height, width)).astype(np.uint8)
    truth[:10] = 255
    prediction = truth.copy()
    prediction[:, :50] = 0
    prediction[truth == 255] = 1
    return image, truth, prediction


@pytest.fixture
def viewer() -> MosaicViewer:
    return MosaicViewer(*scene(), classes=CLASSES, spec=SPEC, tile=64)


def pixels(plot: hv.Overlay) -> np.ndarray:
    picture = next(part for part in plot if isinstance(part, hv.RGB))
    return np.stack([picture.dimension_values(i, flat=False) for i in (2, 3, 4)], axis=-1)


def segments(plot: hv.Overlay) -> hv.Segments:
    return next(part for part in plot if isinstance(part, hv.Segments))


def test_panes_show_image_labels_and_error(viewer: MosaicViewer) -> None:
    image, truth, prediction = scene()
    viewer.widgets["opacity"].value = 1.0
    plots = viewer.plots(viewer.data)
    assert list(plots) == ["image", "truth", "prediction", "error"]
    assert np.array_equal(pixels(plots["image"]), np.moveaxis(image, 0, -1))
    shown = pixels(plots["prediction"])
    assert np.array_equal(
        shown[prediction == 2], np.broadcast_to(CLASSES.rgb[2], shown[prediction == 2].shape)
    )
    # Ignored pixels show the image.
    assert np.array_equal(
        pixels(plots["truth"])[truth == 255], np.moveaxis(image, 0, -1)[truth == 255]
    )
    error = pixels(plots["error"])
    assert (error[truth == 255] == 255).all()
    wrong = (truth != prediction) & (truth != 255)
    assert len(np.unique(error[wrong].reshape(-1, 3), axis=0)) == 1
    assert len(np.unique(error[~wrong & (truth != 255)].reshape(-1, 3), axis=0)) == 1


def test_opacity_blends_image_and_class(viewer: MosaicViewer) -> None:
    image, _, prediction = scene()
    viewer.widgets["opacity"].value = 0.0
    plots = viewer.plots(viewer.data)
    assert np.array_equal(pixels(plots["prediction"]), np.moveaxis(image, 0, -1))
    viewer.widgets["opacity"].value = 0.5
    expected = np.moveaxis(image, 0, -1) / 2 + CLASSES.rgb[prediction] / 2
    gap = np.abs(pixels(viewer.plots(viewer.data)["prediction"]) - expected)
    assert gap.max() <= 1


def test_panes_that_show_the_same_stay_the_same_objects(viewer: MosaicViewer) -> None:
    before = viewer.plots(viewer.data)
    viewer.widgets["opacity"].value = 0.2
    after = viewer.plots(viewer.data)
    assert after["image"] is before["image"]
    assert after["error"] is before["error"]
    assert after["truth"] is not before["truth"]


def test_grid_and_halo_are_drawn_where_the_tiles_are(viewer: MosaicViewer) -> None:
    assert len(segments(viewer.plots(viewer.data)["image"])) == 0
    viewer.widgets["grid"].value = True
    lines = segments(viewer.plots(viewer.data)["image"])
    vertical = lines.dimension_values(0) == lines.dimension_values(2)
    assert sorted(lines.dimension_values(0)[vertical]) == [0, 64, 128, 192, 256]
    viewer.widgets["grid"].value = False
    viewer.widgets["halo"].value = True
    lines = segments(viewer.plots(viewer.data)["error"])
    xs = np.concatenate([lines.dimension_values(i) for i in (0, 2)])
    # The central tile's core from 128 to 192, and 24 pixels of halo.
    assert set(xs) == {128, 192, 128 - 24, 192 + 24}


def test_counts_and_table_against_direct_ones(viewer: MosaicViewer) -> None:
    _, truth, prediction = scene()
    counts = confusion_counts(truth, prediction, 3)
    valid = truth != 255
    assert counts.sum() == valid.sum()
    for i, j in np.ndindex(3, 3):
        assert counts[i, j] == ((truth == i) & (prediction == j)).sum()
    header, *rows = viewer.rows(viewer.data)
    assert header == ["class", "true %", "predicted %", "IoU"]
    iou = ((truth == 2) & (prediction == 2)).sum() / (
        valid & ((truth == 2) | (prediction == 2))
    ).sum()
    assert rows[2][0] == "road"
    assert rows[2][3] == f"{iou:.3f}"
    share = (truth == prediction)[valid].mean()
    assert f"{share:.1%} of all labelled pixels agree" in viewer.summary(viewer.data)


def test_zoom_and_moves_keep_to_the_image(viewer: MosaicViewer) -> None:
    state = viewer.moved(viewer.state, 0, 0, 4)
    assert state.width == viewer.state.width / 4
    centre = state.x + state.width / 2
    assert centre == pytest.approx(150)
    for _ in range(30):
        state = viewer.moved(state, 1, 1, 1)
    assert state.x + state.width / 2 == 300
    assert viewer.moved(state, 0, 0, 1e9).width == 32
    assert viewer.moved(state, 0, 0, 1e-9).width == viewer.state.width
    first = viewer.state
    viewer.show(state)
    assert viewer.data.sizes["x"] >= 1
    viewer.undo()
    assert viewer.state == first


def test_the_mouse_moves_the_view(viewer: MosaicViewer) -> None:
    figure = viewer._axes_of["panes"]
    height = 100 * viewer.pane[1] / viewer.pane[0]
    figure.y_range.update(start=20.0 + height, end=20.0)
    figure.x_range.update(start=10.0, end=110.0)
    assert (viewer.state.x, viewer.state.y, viewer.state.width) == (10.0, 20.0, 100.0)
    assert "Rows 20 to" in viewer.summary(viewer.data)


def test_buttons_zoom_all_panes(viewer: MosaicViewer) -> None:
    figure = viewer._axes_of["panes"]
    viewer.show(viewer.moved(viewer.state, 0, 0, 2))
    assert (figure.x_range.start, figure.x_range.end) == pytest.approx((75, 225), abs=0.5)
    assert figure.y_range.start > figure.y_range.end


def test_one_pane_a_kind_of_labels() -> None:
    image, truth, _ = scene()
    assert list(MosaicViewer(image)._plots) == ["image"]
    only = MosaicViewer(image, truth, classes=CLASSES)
    assert list(only._plots) == ["image", "truth"]
    assert only.rows(only.data)[0] == ["class", "truth", "%"]
    assert "road" in only._legend()


def test_sizes_must_agree() -> None:
    image, truth, prediction = scene()
    with pytest.raises(ShapeError, match="prediction"):
        MosaicViewer(image, truth, prediction[1:], classes=CLASSES)


def test_lazy_scenes_bring_their_own_classes() -> None:
    made = synthetic((256, 300), seed=3)
    viewer = MosaicViewer(made.image, made.labels)
    assert viewer.classes == made.classes
    assert np.array_equal(viewer.data["truth"].values, made.labels.values)


def test_labels_are_never_mixed_at_coarse_levels() -> None:
    labels = np.zeros((2000, 2000), np.uint8)
    labels[:, 1000:] = 2
    image = np.zeros((3, 2000, 2000), np.uint8)
    viewer = MosaicViewer(image, labels, classes=CLASSES)
    assert viewer.data.attrs["level"] >= 2
    assert set(np.unique(viewer.data["truth"].values)) == {0, 2}


@pytest.mark.alone
def test_views_of_a_ten_thousand_pixel_scene_are_quick() -> None:
    side = 10_000
    image = np.broadcast_to(np.arange(side, dtype=np.uint8), (3, side, side))
    labels = np.broadcast_to((np.arange(side) // 500 % 3).astype(np.uint8), (side, side))
    viewer = MosaicViewer(image, labels, labels, classes=CLASSES)
    state, times = viewer.state, []
    for zoom in (2, 2, 2, 2, 2, 0.5, 0.5, 0.5):
        state = viewer.moved(state, 0.1, 0.05, zoom)
        viewer.tables(state)  # makes the level where it is missing
        began = time.perf_counter()
        data = viewer.tables(state)
        times.append(time.perf_counter() - began)
        assert max(data.sizes["y"], data.sizes["x"]) < 900
    # Some milliseconds on an idle machine; 92 to 456 where the whole array was resampled.
    assert np.median(times) < 0.1, times
