"""HoloViews elements as a still picture: SVG for a page without Bokeh, PNG for a saved notebook.

A plot is first lowered to a few primitives in screen pixels (`bigunet.views.lower`), which two
short writers turn into SVG or, by Pillow, into PNG. It takes about 10 ms, where a full plotting
backend takes 200.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from bigunet.views.colours import rgb
from bigunet.views.lower import Drawing, Path, Picture, Text, lower

__all__ = ["to_png", "to_svg"]


def _png_bytes(rgba: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(rgba, "RGBA").save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _svg_item(item: Path | Text | Picture) -> str:
    if isinstance(item, Path):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in item.points)
        if item.fill:
            return f'<polygon points="{points}" fill="{item.fill}" fill-opacity="{item.opacity}"/>'
        dash = ' stroke-dasharray="5 4"' if item.dashed else ""
        return (
            f'<polyline points="{points}" fill="none" stroke="{item.stroke}" '
            f'stroke-width="{item.width}" stroke-opacity="{item.opacity}"{dash}/>'
        )
    if isinstance(item, Text):
        turn = f' transform="rotate(-90 {item.x:.1f} {item.y:.1f})"' if item.turned else ""
        return (
            f'<text x="{item.x:.1f}" y="{item.y:.1f}" font-size="{item.size}" '
            f'fill="{item.colour}" text-anchor="{item.anchor}"{turn}>'
            f"{html.escape(item.text)}</text>"
        )
    data = base64.b64encode(_png_bytes(item.rgba)).decode()
    return (
        f'<image x="{item.x:.1f}" y="{item.y:.1f}" width="{item.width:.1f}" '
        f'height="{item.height:.1f}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{data}"/>'
    )


def to_svg(plot: Any, label: str = "") -> str:
    """An `<svg>` element, with `label` as what a screen reader says of it."""
    drawing = lower(plot)
    left, top, width, height = drawing.frame
    clip = f"c{abs(hash((drawing.width, drawing.height, width, height)))}"
    inner = "".join(map(_svg_item, drawing.inner))
    outer = "".join(map(_svg_item, drawing.outer))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{html.escape(label)}" '
        f'width="{drawing.width}" height="{drawing.height}" '
        f'viewBox="0 0 {drawing.width} {drawing.height}" '
        'font-family="Helvetica,Arial,sans-serif" style="background:#fff">'
        f'<clipPath id="{clip}"><rect x="{left}" y="{top}" width="{width}" height="{height}"/>'
        f'</clipPath><g clip-path="url(#{clip})">{inner}</g>{outer}</svg>'
    )


def _paint(canvas: Image.Image, items: Iterable[Path | Text | Picture]) -> None:
    pen = ImageDraw.Draw(canvas, "RGBA")
    for item in items:
        if isinstance(item, Picture):
            if item.width >= 1 and item.height >= 1:
                size = (round(item.width), round(item.height))
                tile = Image.fromarray(item.rgba, "RGBA").resize(size, Image.Resampling.NEAREST)
                canvas.paste(tile, (round(item.x), round(item.y)), tile)
        elif isinstance(item, Text):
            _paint_text(canvas, pen, item)
        elif item.fill:
            if len(item.points) > 2:
                pen.polygon(item.points, fill=(*rgb(item.fill), round(255 * item.opacity)))
        elif len(item.points) > 1 and item.stroke:
            colour = (*rgb(item.stroke), round(255 * item.opacity))
            pen.line(item.points, fill=colour, width=max(1, round(item.width)))


def _paint_text(canvas: Image.Image, pen: ImageDraw.ImageDraw, item: Text) -> None:
    font = ImageFont.load_default(item.size)
    if not item.turned:
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[item.anchor]
        pen.text((item.x, item.y), item.text, fill=item.colour, font=font, anchor=anchor)
        return
    length = int(font.getlength(item.text)) + 2
    strip = Image.new("RGBA", (length, int(item.size * 1.5)), (255, 255, 255, 0))
    ImageDraw.Draw(strip).text((0, 0), item.text, fill=item.colour, font=font)
    strip = strip.rotate(90, expand=True)
    at = (max(0, round(item.x - item.size)), max(0, round(item.y - length / 2)))
    canvas.paste(strip, at, strip)


def to_png(plots: Sequence[Any], columns: int = 1) -> bytes:
    """One PNG of the plots, row by row."""
    pictures = [_picture(lower(plot)) for plot in plots]
    width, height = (max(p.size[i] for p in pictures) for i in (0, 1))
    tops = [0]
    for first in range(0, len(pictures), columns):
        tops.append(tops[-1] + max(p.size[1] for p in pictures[first : first + columns]))
    whole = Image.new("RGB", (width * min(columns, len(pictures)), max(tops[-1], height)), "white")
    for i, picture in enumerate(pictures):
        whole.paste(picture, (width * (i % columns), tops[i // columns]))
    buffer = io.BytesIO()
    whole.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _picture(drawing: Drawing) -> Image.Image:
    canvas = Image.new("RGB", (drawing.width, drawing.height), "white")
    _paint(canvas, drawing.inner)
    left, top, width, height = (round(v) for v in drawing.frame)
    box = (left, top, left + width, top + height)
    clean = Image.new("RGB", canvas.size, "white")
    clean.paste(canvas.crop(box), box[:2])
    _paint(clean, drawing.outer)
    return clean
