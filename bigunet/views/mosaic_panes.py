"""What MosaicViewer's panes show: pixels, classes over them, tile edges; and how labels agree."""

from __future__ import annotations

from typing import Any

import holoviews as hv
import numpy as np
import xarray as xr

from bigunet.downscale import IGNORE
from bigunet.views.colours import OKABE_ITO, rgb

__all__ = ["confusion_counts", "pane", "pane_pixels", "tile_edges"]

Array = np.ndarray[Any, np.dtype[Any]]
Edge = tuple[float, float, float, float, str]

_STRIP_ROWS = 1024
# More tile edges than this in one view would hide the image.
_MOST_EDGES = 60
_WRONG, _RIGHT = rgb(OKABE_ITO["vermillion"]), (225, 225, 225)
_TITLES = {
    "image": "Image",
    "truth": "Truth",
    "prediction": "Prediction",
    "error": "Error: orange is wrong, white is ignored",
}


def confusion_counts(truth: Any, prediction: Any, num_classes: int) -> Array:
    """(true class, predicted class) pixel counts; ignored pixels left out, a strip at a time."""
    counts = np.zeros((num_classes, num_classes), np.int64)
    for y in range(0, truth.shape[-2], _STRIP_ROWS):
        t = np.asarray(truth[y : y + _STRIP_ROWS]).ravel()
        p = np.asarray(prediction[y : y + _STRIP_ROWS]).ravel()
        valid = (t < num_classes) & (p < num_classes)
        joint = t[valid].astype(np.int64) * num_classes + p[valid]
        counts += np.bincount(joint, minlength=num_classes**2).reshape(counts.shape)
    return counts


def tile_edges(
    view: tuple[float, float, float, float],
    shape: tuple[int, int],
    tile: int,
    *,
    halo: int | None = None,
    grid: bool = False,
) -> list[Edge]:
    """Edges of the tiles' cores and the central tile's core and read box: x0, y0, x1, y1, colour.

    Parameters
    ----------
    view : left, top, width and height of what is seen, in image pixels.
    shape : rows and columns of the image.
    halo : the halo of the central tile, to be drawn with its core; None draws neither.
    """
    (x, y, wide, tall), (height, width) = view, shape
    right, bottom = x + wide, y + tall
    lines: list[Edge] = []
    xs = np.arange(max(0, x // tile) * tile, min(width, right), tile)
    ys = np.arange(max(0, y // tile) * tile, min(height, bottom), tile)
    if grid and len(xs) + len(ys) <= _MOST_EDGES:
        lines += [(at, 0.0, at, float(height), "#FFFFFF") for at in xs]
        lines += [(0.0, at, float(width), at, "#FFFFFF") for at in ys]
    if halo is not None:
        left = np.clip((x + right) / 2, 0, width - 1) // tile * tile
        top = np.clip((y + bottom) / 2, 0, height - 1) // tile * tile
        for grow, colour in ((0, OKABE_ITO["black"]), (halo, OKABE_ITO["yellow"])):
            x0, x1 = max(0, left - grow), min(width, left + tile + grow)
            y0, y1 = max(0, top - grow), min(height, top + tile + grow)
            lines += [(x0, y0, x1, y0, colour), (x0, y1, x1, y1, colour)]
            lines += [(x0, y0, x0, y1, colour), (x1, y0, x1, y1, colour)]
    return lines


def pane_pixels(name: str, data: xr.Dataset, palette: Array) -> Array:
    """What a pane shows, (y, x, 3) uint8: classes laid over the image by the opacity.

    Parameters
    ----------
    palette : (256, 3) uint8, the colour of each label.
    """
    image: Array = data["image"].values
    if name == "image":
        return image
    if name == "error":
        truth, prediction = data["truth"].values, data["prediction"].values
        shades = np.array([_RIGHT, _WRONG, (255, 255, 255)], np.uint8)
        kind = (truth != prediction).astype(np.uint8)
        kind[(truth == IGNORE) | (prediction == IGNORE)] = 2
        return shades[kind]
    labels = data[name].values
    # In 256ths, which is as exact as the screen and several times as fast as floating point.
    opacity = round(256 * data.attrs["opacity"])
    parts = (palette.astype(np.uint16) * opacity)[labels]
    parts += image.astype(np.uint16) * np.uint16(256 - opacity)
    blended: Array = (parts >> 8).astype(np.uint8)
    ignored = labels == IGNORE
    blended[ignored] = image[ignored]
    return blended


def pane(name: str, pixels: Array, data: xr.Dataset, size: tuple[int, int]) -> hv.Overlay:
    """One pane of so many screen pixels (width, height): the picture and the edges over it."""
    picture = hv.RGB(pixels[::-1], kdims=["x", "y"], bounds=data.attrs["bounds"])
    edges = hv.Segments(data.attrs["edges"], ["x", "y", "x1", "y1"], "colour")
    return hv.Overlay([picture, edges.opts(color="colour", line_width=1.5)]).opts(
        title=_TITLES[name],
        frame_width=size[0],
        frame_height=size[1],
        invert_yaxis=True,
        padding=0,
        apply_ranges=False,
        xlabel="",
        ylabel="",
        default_tools=["pan", "wheel_zoom"],
        active_tools=["pan", "wheel_zoom"],
        show_legend=False,
    )
