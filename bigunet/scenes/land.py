"""The land behind `synthetic`: what lies at a pixel, and what it looks like from the air.

Two warped coordinates u and v bend a jittered grid of main roads. Each of its cells is farmland,
cut into strips and fields, or a settlement, cut into plots with houses. Rivers are contour lines of
smooth noise; lakes and woods are its extremes. One index into a palette then gives the colour.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .noise import Float, texture, unit, value_noise

__all__ = ["BUILDING", "FIELD", "ROAD", "WATER", "WOODLAND", "Land"]

FIELD, WOODLAND, WATER, ROAD, BUILDING = range(5)
Array = np.ndarray[Any, np.dtype[Any]]

_CELL = 768  # pixels between main roads, on average
_WARP, _WARP_CELL = 420.0, 1700  # how far, and over what distance, the grid bends
_SPLITS = 12  # at most so many strips a cell, and fields a strip
_STEP = 4  # steps a pixel at which the functions of u alone, or v alone, are tabulated
_ROWS, _COLUMNS = 64, 1024  # computed at once: small enough for a core's cache
_GRAIN = 1020  # period of the grain, a multiple of its blobs

# Fixed palette entries, the waters first; roofs and field colours follow them.
_FIXED = {
    "river": (38, 62, 74), "lake": (30, 58, 78), "wood": (44, 66, 38), "road": (128, 124, 116),
    "street": (112, 112, 112), "hedge": (58, 72, 44), "shadow": (42, 46, 44), "bank": (70, 88, 52),
}  # fmt: skip
_INDEX = {name: i for i, name in enumerate(_FIXED)}
_ROOFS = ((150, 84, 66), (164, 104, 80), (134, 130, 128), (110, 72, 62), (178, 172, 160))
_CROPS = (
    (112, 128, 66), (92, 118, 58), (136, 142, 80), (168, 152, 98), (180, 164, 112),
    (146, 120, 88), (122, 98, 74), (98, 110, 60), (158, 146, 76), (84, 106, 56),
)  # fmt: skip
_ROOF0 = len(_FIXED)
_FIELD0 = _ROOF0 + 2 * len(_ROOFS)  # each roof has a sunny and a shaded side
_CLASS_OF = np.full(_FIELD0, FIELD, np.uint8)
_CLASS_OF[[_INDEX["river"], _INDEX["lake"]]] = WATER
_CLASS_OF[[_INDEX["wood"]]] = WOODLAND
_CLASS_OF[[_INDEX["road"], _INDEX["street"]]] = ROAD
_CLASS_OF[_ROOF0:] = BUILDING


@dataclass(frozen=True)
class _Axis:
    """Functions of one warped coordinate, tabulated from step `first` on."""

    first: int
    cell: Array  # index of the cell, from 0
    place: Float  # where in the cell, 0 to 1
    road: Float  # pixels to the edge of the nearest main road, negative on it


@dataclass(frozen=True)
class _Tables:
    """Hashed properties of the cells and fields that a window can touch."""

    u: _Axis
    v: _Axis
    cells_u: int
    strips: Float  # a cell
    fields: Float  # a strip
    town: Array  # a cell
    house: Array  # a field: (4,) sides of its house, as parts of the field; none: all 2
    wood: Array  # a field: is it a plantation
    rough: Float  # palette: how strongly the grain shows
    blobs: Float
    furrow: Float
    furrow_u: Float
    furrow_v: Float
    palette: Float  # (3, entries)
    roof: Array  # a field: palette entry of its house


class Land:
    """All of the land of one seed; rows and columns are global and start at 0."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def labels(self, y0: int, y1: int, x0: int, x1: int) -> Array:
        """Class ids, uint8 (y1 - y0, x1 - x0)."""
        out = np.empty((y1 - y0, x1 - x0), np.uint8)
        for (a, b, c, d), tables in self._parts(y0, y1, x0, x1):
            index = self._index(a, b, c, d, tables)[0]
            part = out[a - y0 : b - y0, c - x0 : d - x0]
            np.take(_class_of(len(tables.rough)), index, out=part, mode="clip")
        return out

    def image(self, y0: int, y1: int, x0: int, x1: int) -> Array:
        """Colours, uint8 (3, y1 - y0, x1 - x0)."""
        out = np.empty((3, y1 - y0, x1 - x0), np.uint8)
        for (a, b, c, d), tables in self._parts(y0, y1, x0, x1):
            index, u, v = self._index(a, b, c, d, tables)
            shade = self._shade(a, b, c, d, index, u, v, tables)
            for channel in range(3):
                colour = np.take(tables.palette[channel], index, mode="clip")
                colour *= shade
                out[channel, a - y0 : b - y0, c - x0 : d - x0] = colour.astype(np.uint8)
        return out

    def _parts(
        self, y0: int, y1: int, x0: int, x1: int
    ) -> Iterator[tuple[tuple[int, int, int, int], _Tables]]:
        """Small pieces of a window, with the tables for each 1024 pixels of it."""
        for x in range(x0, x1, _COLUMNS):
            right = min(x + _COLUMNS, x1)
            for y in range(y0, y1, _COLUMNS):
                bottom = min(y + _COLUMNS, y1)
                tables = self._tables(y, bottom, x, right)
                for row in range(y, bottom, _ROWS):
                    yield (row, min(row + _ROWS, bottom), x, right), tables

    def _index(
        self, y0: int, y1: int, x0: int, x1: int, tab: _Tables
    ) -> tuple[Array, Float, Float]:
        """Palette entry of each pixel, and the warped coordinates."""
        box, seed = (y0, y1, x0, x1), self.seed
        u = value_noise(*box, _WARP_CELL, seed + 1)
        u *= np.float32(_WARP)
        u += np.arange(x0, x1, dtype=np.float32)
        v = value_noise(*box, _WARP_CELL, seed + 2)
        v *= np.float32(_WARP)
        v += np.arange(y0, y1, dtype=np.float32)[:, None]
        at_u = (u * np.float32(_STEP)).astype(np.intp)
        at_u -= tab.u.first
        at_v = (v * np.float32(_STEP)).astype(np.intp)
        at_v -= tab.v.first

        cell = np.take(tab.v.cell, at_v, mode="clip")
        cell *= tab.cells_u
        cell += np.take(tab.u.cell, at_u, mode="clip")
        # Strips across u, then fields along v: (a, b) is the place in the field.
        a = np.take(tab.u.place, at_u, mode="clip")
        strips = np.take(tab.strips, cell, mode="clip")
        a *= strips
        strip = a.astype(np.intp)
        a -= strip.astype(np.float32)
        cell *= _SPLITS
        strip += cell
        b = np.take(tab.v.place, at_v, mode="clip")
        fields = np.take(tab.fields, strip, mode="clip")
        b *= fields
        along = b.astype(np.intp)
        b -= along.astype(np.float32)
        field = strip * _SPLITS
        field += along

        index = field + _FIELD0
        side_u, side_v = np.float32(_CELL) / strips, np.float32(_CELL) / fields
        town = np.take(tab.town, cell // _SPLITS, mode="clip")
        edge_a = (np.float32(0.5) - np.abs(a - np.float32(0.5))) * side_u
        edge_b = (np.float32(0.5) - np.abs(b - np.float32(0.5))) * side_v
        edge = np.minimum(edge_a, edge_b)
        np.copyto(index, _INDEX["hedge"], where=edge < np.float32(1.6))
        self._nature(box, index, np.take(tab.wood, field, mode="clip"), town)
        if town.any():
            street = (edge_a < 4) & (((strip + (a > 0.5)) & 1) == 0) & town
            street |= (edge_b < 4) & (((along + (b > 0.5)) & 3) == 0) & town
            np.copyto(index, _INDEX["street"], where=street & (index > _INDEX["lake"]))
        self._houses(index, field, a, b, side_u, side_v, tab)
        road = np.minimum(
            np.take(tab.u.road, at_u, mode="clip"), np.take(tab.v.road, at_v, mode="clip")
        )
        np.copyto(index, _INDEX["road"], where=road < 0)
        return index, u, v

    def _nature(
        self, box: tuple[int, int, int, int], index: Array, planted: Array, town: Array
    ) -> None:
        """Woods, lakes and rivers over what farmers and builders have laid out."""
        growth = value_noise(*box, 620, self.seed + 3)
        growth += np.float32(0.3) * value_noise(*box, 90, self.seed + 4)
        np.copyto(index, _INDEX["lake"], where=growth < np.float32(0.2))
        growth += np.float32(0.06) * value_noise(*box, 14, self.seed + 5)
        wood = growth > np.float32(0.98)
        wood |= planted & ~town
        np.copyto(index, _INDEX["wood"], where=wood & ~town)
        flow = value_noise(*box, 2600, self.seed + 6)
        flow += np.float32(0.22) * value_noise(*box, 480, self.seed + 7)
        flow -= np.float32(0.61)
        np.abs(flow, out=flow)
        near = flow < np.float32(0.022)
        if near.any():
            np.copyto(index, _INDEX["bank"], where=near & ~wood)
            np.copyto(index, _INDEX["river"], where=flow < np.float32(0.012))

    def _houses(
        self, index: Array, field: Array, a: Float, b: Float, side_u: Float, side_v: Float,
        tab: _Tables,
    ) -> None:  # fmt: skip
        built = np.flatnonzero(np.take(tab.house[0] < 1, field, mode="clip"))
        if not built.size:
            return
        flat = index.reshape(-1)
        f, a, b = field.reshape(-1)[built], a.reshape(-1)[built], b.reshape(-1)[built]
        left, right, top, bottom = (side[f] for side in tab.house)
        fall_a = np.float32(5) / side_u.reshape(-1)[built]
        fall_b = np.float32(5) / side_v.reshape(-1)[built]
        dry = flat[built] > _INDEX["lake"]
        shadow = (a >= left + fall_a) & (a < right + fall_a)
        shadow &= (b >= top + fall_b) & (b < bottom + fall_b) & dry
        flat[built[shadow]] = _INDEX["shadow"]
        house = (a >= left) & (a < right) & (b >= top) & (b < bottom) & dry
        shaded = (a - left) * 2 > right - left
        flat[built[house]] = tab.roof[f[house]] + shaded[house]

    def _shade(
        self, y0: int, y1: int, x0: int, x1: int, index: Array, u: Float, v: Float, tab: _Tables
    ) -> Float:
        """What the palette's colour is multiplied by, 0.5 to 1.35."""
        shade = value_noise(y0, y1, x0, x1, 360, self.seed + 8)
        shade += value_noise(y0, y1, x0, x1, 47, self.seed + 9)
        shade *= np.float32(0.14)
        shade += np.float32(0.86)
        top, left = y0 % _GRAIN, x0 % _GRAIN
        rows, columns = slice(top, top + y1 - y0), slice(left, left + x1 - x0)
        for grain, cell in ((tab.rough, 1), (tab.blobs, 6)):
            part = np.take(grain, index, mode="clip")
            part *= _grain(cell)[rows, columns]
            shade += part
        wave = u * np.take(tab.furrow_u, index, mode="clip")
        wave += v * np.take(tab.furrow_v, index, mode="clip")
        wave -= np.floor(wave)
        wave -= np.float32(0.5)
        np.abs(wave, out=wave)
        wave *= np.take(tab.furrow, index, mode="clip")
        shade += wave
        return np.clip(shade, np.float32(0.5), np.float32(1.35), out=shade)

    def _tables(self, y0: int, y1: int, x0: int, x1: int) -> _Tables:
        u, cells_u, first_u = self._axis(x0, x1, 21)
        v, cells_v, first_v = self._axis(y0, y1, 22)
        i = (first_u + np.arange(cells_u))[None, :]
        j = (first_v + np.arange(cells_v))[:, None]
        seed = self.seed

        def draw(salt: int, *more: Any) -> Float:
            extra = len(more)
            return unit(seed, salt, j[(...,) + (None,) * extra], i[(...,) + (None,) * extra], *more)

        centre = unit(seed, 30, j // 3, i // 3) < 0.25
        town = (draw(31) < np.where(centre, 0.8, 0.04)).reshape(-1)
        k, m = np.arange(_SPLITS)[:, None], np.arange(_SPLITS)
        strips = np.where(town, 8 + draw(32).reshape(-1) * 5, 1 + draw(32).reshape(-1) * 3.9)
        fields = np.where(town[:, None], 8 + draw(33).reshape(-1, 1) * 5, 0)
        fields = np.where(
            town[:, None], fields, 1 + draw(34, np.arange(_SPLITS)).reshape(-1, _SPLITS) * 3.5
        )
        town_field = np.repeat(town, _SPLITS**2)
        lot = [draw(40 + n, k, m).reshape(-1) for n in range(10)]
        # Houses: on most plots of a settlement, on few fields. Sides are parts of the field.
        house = lot[0] < np.where(town_field, 0.86, 0.12)
        span = np.where(town_field, 1.0, 0.22).astype(np.float32)
        left, top = 0.2 + 0.25 * lot[1], 0.2 + 0.25 * lot[2]
        sides = (left, left + span * (0.24 + 0.2 * lot[3]), top, top + span * (0.24 + 0.2 * lot[4]))
        roof = _ROOF0 + 2 * (lot[5] * len(_ROOFS)).astype(np.intp)

        crop = (lot[6] * len(_CROPS)).astype(np.intp)
        colour = np.array(_CROPS, np.float32)[crop] * (0.88 + 0.24 * lot[7])[:, None]
        lawn = np.array((96, 108, 68), np.float32) * (0.85 + 0.3 * lot[7])[:, None]
        colour = np.where(town_field[:, None], lawn, colour)
        fixed = [np.array(c, np.float32) for c in _FIXED.values()]
        roofs = [np.array(c, np.float32) * f for c in _ROOFS for f in (1.0, 0.78)]
        palette = np.concatenate([np.array([*fixed, *roofs]), colour]).T.astype(np.float32)

        def spread(default: float, per_field: Any, **named: float) -> Float:
            head = np.full(_FIELD0, default)
            for name, value in named.items():
                head[_INDEX[name]] = value
            return np.concatenate([head, per_field]).astype(np.float32)

        across = lot[8] < 0.5  # furrows run along u or along v, 6 to 14 pixels apart
        pitch = 1 / (6 + 8 * lot[9])
        zeros = np.zeros(len(lot[0]))
        return _Tables(
            u=u, v=v, cells_u=cells_u,
            strips=np.floor(strips).astype(np.float32),
            fields=np.floor(fields).astype(np.float32).reshape(-1),
            town=town,
            house=np.where(house, np.array(sides), 2).astype(np.float32),
            wood=(lot[3] < 0.07) & ~house,
            rough=spread(0.06, zeros + 0.1, river=0.03, lake=0.02, wood=0.3, bank=0.2, hedge=0.3),
            blobs=spread(0.0, np.where(town_field, 0.5, 0.06), wood=0.9, bank=0.5, hedge=0.4),
            furrow=spread(0.0, np.where(town_field, 0, 0.06 + 0.3 * (lot[4] * lot[4]))),
            furrow_u=spread(0.0, np.where(across, pitch, 0)),
            furrow_v=spread(0.0, np.where(across, 0, pitch)),
            palette=palette,
            roof=roof,
        )  # fmt: skip

    def _axis(self, low: int, high: int, salt: int) -> tuple[_Axis, int, int]:
        """The tabulated axis, the number of cells that it touches, and the first one's index."""
        first, last = low * _STEP, int((high + _WARP + 1) * _STEP)
        where = (np.arange(first, last + 1) + 0.5) / _STEP
        line = np.arange(int(where[0] // _CELL) - 1, int(where[-1] // _CELL) + 3)
        position = (line + 0.5 * (unit(self.seed, salt, line) - 0.5).astype(np.float64)) * _CELL
        half = np.where(line % 4 == 0, 8.0, 4.5)
        at = np.searchsorted(position, where, side="right") - 1
        before, after = where - position[at], position[at + 1] - where
        road = np.minimum(before - half[at], after - half[at + 1])
        place = np.minimum(before / (before + after), 1 - 2.0**-20)
        start = int(at[0])
        axis = _Axis(first, at - start, place.astype(np.float32), road.astype(np.float32))
        return axis, int(at[-1]) - start + 1, int(line[start])


@lru_cache(maxsize=8)
def _class_of(entries: int) -> Array:
    return np.concatenate([_CLASS_OF, np.full(entries - _FIELD0, FIELD, np.uint8)])


@lru_cache(maxsize=4)
def _grain(cell: int) -> Float:
    return texture(_GRAIN, cell, (_ROWS, _COLUMNS))
