"""The colours of every plot: Okabe and Ito's eight, told apart by all common kinds of sight.

Source: M. Okabe, K. Ito, "Color Universal Design", https://jfly.uni-koeln.de/color/. Plots carry
text labels as well, so that no meaning rests on colour alone.
"""

from __future__ import annotations

__all__ = ["CYCLE", "GREY", "LIGHT", "OKABE_ITO", "TEXT", "rgb"]

OKABE_ITO: dict[str, str] = {
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "purple": "#CC79A7",
    "black": "#000000",
}

# In the order in which series take them; yellow last, being faint on white.
CYCLE: tuple[str, ...] = tuple(
    OKABE_ITO[name] for name in ("blue", "orange", "green", "purple", "sky", "vermillion", "yellow")
)

GREY = "#8A8A8A"
LIGHT = "#E4E4E4"
TEXT = "#222222"


def rgb(colour: str) -> tuple[int, int, int]:
    """Red, green and blue, 0 to 255, of "#RRGGBB"."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
