"""Exercises of notebooks 00 to 03: tiles, halo, memory, the whole gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bigunet.exercises.verdict import Verdict, choice, exercise, number
from bigunet.geometry import closed_form_halo
from bigunet.handover import Handover
from bigunet.scenes import EARTH_SHAPE
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import tile_image
from bigunet.views.memory import memory_by_depth, memory_tables

__all__ = ()

# 00 ---------------------------------------------------------------------------------------------


@exercise(
    "00.1",
    "How many pixels does a tile of 64 x 64 in the middle of the scene read for each that it "
    "answers for?",
    "a number",
)
def _read_for_each(answer: Any) -> Verdict:
    spec, side = Handover().spec, 64
    across = (side + 2 * spec.halo_aligned) / side
    near = {
        across: "That is along one side. A tile has two.",
        ((side + 2 * spec.halo) / side) ** 2: "Close: reads start and end on the stride.",
        ((side + spec.halo_aligned) / side) ** 2: "There is a halo on both sides of the core.",
    }
    return number(
        answer, across**2, "With 384 it is far less: small tiles read mostly halo.", near, 0.01
    )


@exercise(
    "00.2",
    "Where do the mosaic's errors gather?",
    "'tile edges' or 'class borders'",
)
def _errors_gather(answer: Any) -> Verdict:
    return choice(
        answer,
        "class borders",
        "The halo makes each pixel see what it would see in the whole image.",
        {"tile edges": "Switch the tile grid on in the viewer: does the error follow its lines?"},
    )


@exercise(
    "00.3",
    "Which window is the whole scene?",
    "(first row, end row, first column, end column)",
)
def _whole_scene(answer: Any) -> Verdict:
    top, bottom, left, right = (int(n) for n in answer)
    height, width = EARTH_SHAPE
    if (top, bottom, left, right) == (0, height, 0, width):
        return Verdict(True, "Set the parameter to it, run all cells, and compare the tables.")
    wrong = [
        word
        for word, is_wrong in (
            ("it starts below the first row", top > 0),
            ("it starts right of the first column", left > 0),
            ("rows are missing or too many", bottom - top != height),
            ("columns are missing or too many", right - left != width),
        )
        if is_wrong
    ]
    return Verdict(False, f"Of that window, {', and '.join(wrong)}: see earth().shape.")


# 01 ---------------------------------------------------------------------------------------------


@exercise(
    "01.1", "How wide is the halo of 6 levels, 3 convolutions, kernel 5?", "a number of pixels"
)
def _halo_of_six(answer: Any) -> Verdict:
    spec = UNetSpec(levels=6, convs=3, kernel=5)
    stride, radius = spec.stride, spec.radius
    near = {
        (3 * stride - 2) * radius: "That is the short formula, which leaves out the lattice.",
        spec.halo_aligned: "That is the halo on the stride. The question is for the bare one.",
        (6 * stride - 1) * radius: "The stride of 6 levels is 2^5: there are 5 poolings.",
        (3 * stride - 1) * 3: "A kernel of 5 reaches 2 pixels to each side.",
    }
    return number(answer, spec.halo, "Interval arithmetic and the closed form agree.", near)


@exercise(
    "01.2",
    "For which network is the closed form larger than the true halo?",
    "a network, UNetSpec(levels=..., convs=..., kernel=...)",
)
def _closed_form_too_large(answer: UNetSpec) -> Verdict:
    closed = closed_form_halo(answer.levels, answer.radius)
    seen = f"The closed form gives {closed}, interval arithmetic {answer.halo}."
    if answer.up == "bilinear":
        return Verdict(False, "The closed form is not meant for bilinear up-sampling.")
    if closed > answer.halo:
        return Verdict(True, seen)
    return Verdict(False, f"{seen} What does the formula assume of stride and radius?")


@exercise(
    "01.3",
    "By how many pixels is the course's network's halo wider with bilinear up-sampling?",
    "a number of pixels",
)
def _bilinear(answer: Any) -> Verdict:
    spec = Handover().spec
    wide = spec.replace(up="bilinear")
    near = {
        wide.halo: "That is the whole halo. How much wider is it?",
        0: "Bilinear interpolation reads a neighbour more than the transposed convolution.",
        spec.levels - 1: "One pixel more at each up-sampling, but counted on which level?",
    }
    return number(
        answer,
        wide.halo - spec.halo,
        "Each level's neighbour is worth twice as much on the level above.",
        near,
    )


# 02 ---------------------------------------------------------------------------------------------


@exercise(
    "02.1",
    "Which three ways put an image of 10,000 x 10,000 pixels on a device of 16 GB?",
    "a list of three MemoryState(spec, train, image, tile, device)",
)
def _three_ways(answer: Sequence[Any]) -> Verdict:
    faults = []
    for place, way in enumerate(answer, start=1):
        data = memory_tables(way)
        over = int(data["peak"][0]) - int(data.attrs["capacity_bytes"])
        if way.image < 10_000:
            faults.append(f"way {place} has a smaller image")
        elif way.device != "V100-16GB":
            faults.append(f"way {place} is for another device")
        elif over > 0:
            faults.append(f"way {place} is {over / 2**30:.1f} GiB over")
    kinds = {(way.spec, way.train, way.tile > 0) for way in answer}
    if len(answer) < 3 or len(kinds) < 3:
        faults.append("they must be three that differ in more than the tile's side")
    if all(way.tile for way in answer):
        faults.append("one of them does without tiles (tile 0)")
    if faults:
        text = "; ".join(faults)
        return Verdict(False, f"{text[0].upper()}{text[1:]}.")
    return Verdict(True, "All three fit.")


@exercise(
    "02.2",
    "From how many levels on do the 2015 network's parameters take more than its activations, at "
    "256 x 256 pixels?",
    "a number of levels",
)
def _depth(answer: Any) -> Verdict:
    table = memory_by_depth(UNetSpec(), (1, 3, 256, 256), TrainSpec(), range(1, 8))
    larger = table["parameters"] > table["activations"]
    held = table["parameters"] + table["gradients_and_optimiser"]
    truth = int(table["levels"].values[larger.values][0])
    with_all = int(table["levels"].values[(held > table["activations"]).values][0])
    near = {with_all: "That counts gradients and the optimiser's state as well."}
    return number(
        answer, truth, "A level more has four times the parameters; its maps hardly count.", near
    )


@exercise(
    "02.3",
    "With each block recomputed and the whole image, where is the peak?",
    "'first encoder block', 'bottleneck' or 'last decoder block'",
)
def _peak_where(answer: Any) -> Verdict:
    return choice(
        answer,
        "last decoder block",
        "There the block's own maps are alive again, beside all that waits for the encoder.",
        {
            "first encoder block": "It is as wide, but by its backward pass most is freed.",
            "bottleneck": "Its maps are the smallest of all. See the plot of the step.",
        },
    )


# 03 ---------------------------------------------------------------------------------------------


@exercise(
    "03.1",
    "A scene of 200 x 232 pixels in tiles of 96: how many pixels does the smallest answer for?",
    "a number of pixels",
)
def _smallest_tile(answer: Any) -> Verdict:
    areas = sorted({t.write.area for t in tile_image((200, 232), 96, Handover().spec)})
    near = dict.fromkeys(areas[1:], "One tile is smaller still: look at the corner.")
    return number(answer, areas[0], "Its weight in the loss is that of its pixels, no more.", near)


@exercise(
    "03.2",
    "Rank 0 has 100 labelled pixels of mean loss 1, rank 1 has 900 of mean loss 2. What is the "
    "image's mean loss?",
    "a number",
)
def _mean_of_means(answer: Any) -> Verdict:
    near = {1.5: "That is the mean of means: each pixel of rank 0 would count nine times."}
    return number(
        answer,
        (100 * 1 + 900 * 2) / 1000,
        "So every rank divides by the count of all ranks.",
        near,
        1e-3,
    )


@exercise(
    "03.3",
    "Which network is not exact in tiles, whatever their halo?",
    "a network, UNetSpec(norm=...)",
)
def _not_exact(answer: UNetSpec) -> Verdict:
    if answer.tile_exact:
        return Verdict(False, f'With norm="{answer.norm}" a haloed tile equals the whole image.')
    return Verdict(True, "It depends on the extent that it sees, so an exact step refuses it.")
