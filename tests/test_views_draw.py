"""Still pictures: where things are drawn, in SVG and in PNG."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET

import holoviews as hv
import numpy as np
import pytest
import xarray as xr
from PIL import Image

from bigunet.views import Still, plot_against
from bigunet.views.colours import OKABE_ITO, rgb
from bigunet.views.draw import to_png, to_svg
from bigunet.views.halo import HaloState, halo_tables, plot_tile, plot_work
from bigunet.views.hatch import hatch
from bigunet.views.lower import extent, lower, nice_ticks

GREEN = OKABE_ITO["green"]


def square(**options: object) -> hv.Overlay:
    box = hv.Rectangles([(0, 0, 10, 5)]).opts(fill_color=GREEN, line_color=None)
    shown = {"frame_width": 200, "frame_height": 100, "xlim": (0, 20), "ylim": (0, 10)}
    return hv.Overlay([box]).opts(**{**shown, "apply_ranges": False, **options})


@pytest.mark.parametrize("flip", [False, True])
def test_a_rectangle_is_where_it_belongs(flip: bool) -> None:
    plot = square(invert_yaxis=flip)
    left, top, _, _ = lower(plot).frame
    picture = np.asarray(Image.open(io.BytesIO(to_png([plot]))))
    upper, below = (picture[int(top) + dy, int(left) + 50] for dy in (25, 75))
    inside, outside = (upper, below) if flip else (below, upper)
    assert tuple(inside) == rgb(GREEN)
    assert tuple(outside) == (255, 255, 255)
    assert tuple(picture[int(top) + (25 if flip else 75), int(left) + 150]) == (255, 255, 255)


def test_svg_is_well_formed_and_speaks() -> None:
    data = halo_tables(HaloState())
    for plot in (plot_tile(data), plot_work(data)):
        tree = ET.fromstring(to_svg(plot, "five levels & a <halo>"))
        assert tree.attrib["aria-label"] == "five levels & a <halo>"
        assert tree.attrib["role"] == "img"
        texts = [t.text for t in tree.iter("{http://www.w3.org/2000/svg}text")]
        assert any(t and ("halo: 94 needed" in t or "GFLOP" in t) for t in texts)


def test_pictures_are_embedded_the_right_way_up() -> None:
    pixels = np.zeros((2, 2, 3), np.uint8)
    pixels[0] = 255  # at the largest y
    for flip in (False, True):
        image = hv.RGB(pixels, bounds=(0, 0, 20, 10))
        plot = hv.Overlay([image]).opts(
            frame_width=200, frame_height=100, invert_yaxis=flip, apply_ranges=False
        )
        left, top, _, _ = lower(plot).frame
        picture = np.asarray(Image.open(io.BytesIO(to_png([plot]))))
        assert picture[int(top) + (75 if flip else 25), int(left) + 100].min() == 255


def test_data_aspect_makes_units_equal() -> None:
    x, y, flip = extent(square(data_aspect=1, invert_yaxis=True))
    assert flip
    assert (x[1] - x[0]) / 200 == pytest.approx((y[1] - y[0]) / 100)


def test_ticks_are_round() -> None:
    assert nice_ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert nice_ticks(-130, 700) == [0, 200, 400, 600]
    assert nice_ticks(3, 3) == [3]


def test_hatching_stays_in_its_box() -> None:
    lines = hatch([(2, 3, 4, 9), (0, 0, 0, 5)], span=(10, 10))
    xs = np.concatenate([lines.dimension_values(i) for i in (0, 2)])
    ys = np.concatenate([lines.dimension_values(i) for i in (1, 3)])
    assert len(lines) > 5
    assert xs.min() >= 2 - 1e-9
    assert xs.max() <= 4 + 1e-9
    assert ys.min() >= 3 - 1e-9
    assert ys.max() <= 9 + 1e-9


def test_an_unknown_element_is_refused() -> None:
    with pytest.raises(TypeError, match="Image"):
        lower(hv.Overlay([hv.Image(np.zeros((2, 2)))]))


def test_lines_come_with_their_numbers() -> None:
    data = xr.Dataset(
        {"error": ("halo", [1e-2, 1e-4, 0.0])},
        coords={"halo": ("halo", [8, 16, 24], {"units": "pixels"})},
    )
    shown = plot_against(data, "halo", ["error"], log=True, title="Error")
    assert isinstance(shown, Still)
    curve = next(part for part in shown.plot if isinstance(part, hv.Curve))
    # 0 lies one power of ten below the smallest other value.
    assert curve.dimension_values(1).tolist() == [-2.0, -4.0, -5.0]
    assert shown.rows == [["halo", "error"], [8, "0.01"], [16, "0.0001"], [24, "0"]]
    bundle = shown._repr_mimebundle_()
    assert set(bundle) == {"image/png", "text/html", "text/plain"}
    assert "<svg" in bundle["text/html"]
    assert "0.0001" in bundle["text/html"]
