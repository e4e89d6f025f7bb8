"""The class table: names, colours and the id that means "ignore this pixel"."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ..errors import SceneError, fail

__all__ = ["OKABE_ITO", "ClassTable", "default_colours", "find_class_file", "rgb_of"]

#: Okabe and Ito (2008), "Color Universal Design": distinct under the common colour deficiencies.
OKABE_ITO: tuple[str, ...] = (
    "#0072b2",
    "#009e73",
    "#e69f00",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
    "#f0e442",
    "#000000",
)
_HEX = re.compile(r"#[0-9a-f]{6}")
_SIDECARS = ("yaml", "yml", "json", "csv")


def default_colours(num_classes: int) -> tuple[str, ...]:
    """`num_classes` colours: Okabe-Ito first, then the same eight mixed with more and more white.

    From the ninth class on the colours are close to each other: rely on the text labels too.
    """
    rounds = max(1, -(-num_classes // len(OKABE_ITO)))
    colours = []
    for i in range(num_classes):
        mix = (i // len(OKABE_ITO)) / rounds
        rgb = (int(OKABE_ITO[i % len(OKABE_ITO)][j : j + 2], 16) for j in (1, 3, 5))
        colours.append("#" + "".join(f"{round(v + (255 - v) * mix):02x}" for v in rgb))
    return tuple(colours)


def rgb_of(colours: tuple[str, ...]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Colours '#rrggbb' as uint8, shape (n, 3)."""
    digits = "".join(c[1:] for c in colours)
    return np.frombuffer(bytes.fromhex(digits), dtype=np.uint8).reshape(-1, 3).copy()


@dataclass(frozen=True)
class ClassTable:
    """Names and colours of the classes 0 .. n-1, and the label id that is left out everywhere.

    Colours are '#rrggbb'; left empty, they are `default_colours`. `ignore` lies outside 0 .. n-1.
    `ignore_colours` are colours of a colour-coded mask that also mean "ignore".
    Raises `SceneError`.
    """

    names: tuple[str, ...]
    colours: tuple[str, ...] = ()
    ignore: int = 255
    ignore_colours: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "names", tuple(str(n) for n in self.names))
        put(self, "colours", tuple(c.lower() for c in self.colours) or default_colours(len(self)))
        put(self, "ignore_colours", tuple(c.lower() for c in self.ignore_colours))
        if not self.names or len(set(self.names)) != len(self.names):
            fail(
                SceneError,
                rule="a class table needs at least one class, each with its own name",
                got=self.names,
                remedy="Give every class a different name",
            )
        if len(self.colours) != len(self.names):
            fail(
                SceneError,
                rule=f"a class table of {len(self.names)} classes needs as many colours",
                got=f"{len(self.colours)} colours",
                remedy="Give one colour a class, or none to take the default ones",
            )
        every = (*self.colours, *self.ignore_colours)
        bad = [c for c in every if not _HEX.fullmatch(c)]
        if bad or len(set(every)) != len(every):
            fail(
                SceneError,
                rule="class colours must be different from each other and written '#rrggbb'",
                got=bad or every,
                remedy="Write for example '#0072b2'",
            )
        if 0 <= self.ignore < len(self.names):
            fail(
                SceneError,
                rule=f"the ignored id must lie outside the class ids 0 to {len(self.names) - 1}",
                got=self.ignore,
                remedy="Choose for example ignore=255 or -1",
            )

    def __len__(self) -> int:
        return len(self.names)

    @property
    def rgb(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Colours as uint8, shape (classes, 3)."""
        return rgb_of(self.colours)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, fit for JSON, YAML and xarray attrs."""
        out: dict[str, Any] = {
            "names": list(self.names),
            "colours": list(self.colours),
            "ignore": self.ignore,
        }
        if self.ignore_colours:
            out["ignore_colours"] = list(self.ignore_colours)
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ClassTable:
        """The inverse of `to_dict`; an unknown or missing key is a `SceneError`."""
        known = {"names", "colours", "ignore", "ignore_colours"}
        if not isinstance(data, Mapping) or "names" not in data or set(data) - known:
            fail(
                SceneError,
                rule=f"a class table has 'names' and at most the keys {sorted(known)}",
                got=sorted(data) if isinstance(data, Mapping) else type(data).__name__,
                remedy="Write names: [a, b], colours: ['#0072b2', '#009e73'], ignore: 255",
            )
        return cls(
            tuple(data["names"]),
            tuple(data.get("colours", ())),
            int(data.get("ignore", 255)),
            tuple(data.get("ignore_colours", ())),
        )

    @classmethod
    def from_file(cls, path: str | Path) -> ClassTable:
        """From YAML or JSON (keys of `to_dict`), or CSV with a header.

        The CSV columns are `name` and either `colour` or `r,g,b`; rows are the ids 0, 1, ... in
        order; a row named "unknown" or "ignore" gives an ignored colour instead of a class.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".csv":
                return cls._from_csv(text)
            data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        except SceneError:
            raise
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
            fail(
                SceneError,
                rule="a class table file must be readable YAML, JSON or CSV",
                got=f"{path}: {error}",
                remedy="See ClassTable.from_file for the three forms",
            )
        return cls.from_dict(data)

    @classmethod
    def _from_csv(cls, text: str) -> ClassTable:
        names, colours, ignored = [], [], []
        for row in csv.DictReader(text.splitlines(), skipinitialspace=True):
            colour = row.get("colour") or row.get("color") or ""
            if row.get("r") is not None:
                colour = "#" + "".join(f"{int(row[k]):02x}" for k in "rgb")
            if row["name"].strip().lower() in ("unknown", "ignore"):
                ignored.append(colour)
            else:
                names.append(row["name"].strip())
                colours.append(colour)
        return cls(tuple(names), tuple(c for c in colours if c), ignore_colours=tuple(ignored))


def find_class_file(path: Path) -> Path | None:
    """The class table that belongs to a label file, or None.

    Looked for beside it, in this order: `<stem>.classes.<ext>`, `classes.<ext>`,
    `class_dict.csv`, with ext yaml, yml, json, csv.
    """
    names = [f"{path.stem}.classes.{e}" for e in _SIDECARS] + [f"classes.{e}" for e in _SIDECARS]
    for name in (*names, "class_dict.csv"):
        if (path.parent / name).is_file():
            return path.parent / name
    return None
