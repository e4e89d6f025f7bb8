"""Exercises of notebooks 04 to 07: stages, scaling, both at once, a scene of one's own."""

from __future__ import annotations

from typing import Any

from bigunet.areas import row_areas_km2
from bigunet.exercises.verdict import Verdict, choice, exercise, number
from bigunet.handover import Handover
from bigunet.scenes import earth
from bigunet.schedule import bubble_fraction
from bigunet.tiles import count_tiles, tile_image

__all__ = ()

# 04 ---------------------------------------------------------------------------------------------


@exercise(
    "04.1",
    "With 3 equal stages, from how many micro-batches on is the bubble at most 10 %?",
    "a number of micro-batches",
)
def _bubble(answer: Any) -> Verdict:
    truth = next(m for m in range(1, 1000) if bubble_fraction(3, m) <= 0.1)
    given = int(answer)
    if given != truth and given > 0:
        share = bubble_fraction(3, given)
        more = " Fewer would do." if given > truth else ""
        return Verdict(False, f"With {given} it is {share:.1%}.{more}")
    return number(
        answer, truth, "(K - 1) / (M + K - 1) falls slowly, and micro-batches cost kernels."
    )


@exercise(
    "04.2",
    "Which loss of time does a U-Net have that a plain stack of equal layers has not?",
    "'bubble', 'transfer of skips' or 'kernel starts'",
)
def _lost(answer: Any) -> Verdict:
    return choice(
        answer,
        "transfer of skips",
        "And the largest are made first and joined last.",
        {
            "bubble": "Every pipeline has one, whatever its layers.",
            "kernel starts": "Every network pays those, and more with smaller micro-batches.",
        },
    )


# 05 ---------------------------------------------------------------------------------------------


@exercise(
    "05.1",
    "One image of 10,000 x 10,000 pixels in tiles of 1024 on 64 GPUs: what efficiency do the tiles "
    "allow at most?",
    "a number, 1 for all that is possible",
)
def _efficiency_of_tiles(answer: Any) -> Verdict:
    tiles, gpus = count_tiles((10_000, 10_000), 1024, Handover().spec), 64
    most = -(-tiles // gpus)
    near = {
        gpus / tiles: "That is GPUs over tiles. How many tiles does the busiest GPU run?",
        tiles / gpus: "That is the mean number of tiles of a GPU, and tiles are whole.",
        1 / most: "That would be if only one GPU had as many.",
        1.0: "Only where each GPU has as many tiles as every other.",
    }
    return number(answer, tiles / (gpus * most), "Smaller tiles deal out more evenly.", near, 0.01)


@exercise(
    "05.2",
    "In weak scaling, which part of a sample-parallel step still grows with the GPUs?",
    "'compute', 'halo redundancy' or 'all-reduce'",
)
def _weak_growth(answer: Any) -> Verdict:
    same = "Each GPU has as many tiles of its own as before."
    return choice(
        answer,
        "all-reduce",
        "More members, more messages, one after the other.",
        {"compute": same, "halo redundancy": same},
    )


@exercise(
    "05.3",
    "A ring sums gradients: how many times the gradients' bytes does each of 1,000 GPUs send?",
    "a number",
)
def _ring(answer: Any) -> Verdict:
    near = {
        1.0: "That is what each of two GPUs sends.",
        1000.0: "So much travels in all, twice. What does one of them send?",
        999.0: "Each of that many messages is a small part of the gradients.",
        1998.0: "That is the number of messages, each a thousandth of the gradients.",
        0.999: "That is half the way: the sums have to come back to all.",
    }
    return number(
        answer, 2 * 999 / 1000, "It hardly depends on their number; latency does.", near, 0.002
    )


# 06 ---------------------------------------------------------------------------------------------


@exercise(
    "06.1",
    "A scene of 200 x 232 pixels in tiles of 64, two pipelines of four micro-batches: how many "
    "passes does a pipeline make?",
    "a number of passes",
)
def _passes(answer: Any) -> Verdict:
    tiles = len(tile_image((200, 232), 64, Handover().spec))
    share = -(-tiles // 2)
    near = {
        -(-tiles // 4): "That is one pipeline alone.",
        share: "That is one tile a pass. A pass takes four.",
    }
    return number(
        answer,
        -(-share // 4),
        "A pass that is not full is filled up with tiles that count nothing.",
        near,
    )


@exercise(
    "06.2",
    "What do two pipelines of a step send each other?",
    "'maps', 'skips' or 'gradients'",
)
def _between_pipelines(answer: Any) -> Verdict:
    inside = "These travel between the stages of one pipeline."
    return choice(
        answer,
        "gradients",
        "Once a step, of each stage, summed over its copies.",
        {"maps": inside, "skips": inside},
    )


@exercise(
    "06.3",
    "Six devices, and the network fits on two together but not on one: how many stages?",
    "a number of stages",
)
def _fewest_stages(answer: Any) -> Verdict:
    near = {
        1: "Then each device holds the whole network, and it does not fit.",
        6: "It runs, but its bubble is the longest.",
        3: "It runs. But what does a further stage cost that a further pipeline does not?",
    }
    return number(
        answer,
        2,
        "The fewest that fit; the rest as pipelines: an all-reduce costs less than a bubble.",
        near,
    )


# 07 ---------------------------------------------------------------------------------------------


@exercise(
    "07.1",
    "What share of the ground of a pixel at the equator does one at 60 degrees north cover, on a "
    "grid of degrees?",
    "a number between 0 and 1",
)
def _pixel_areas(answer: Any) -> Verdict:
    scene = earth().image
    cells = row_areas_km2(scene)
    assert cells is not None
    rows = [int(abs(scene.y.values - latitude).argmin()) for latitude in (60, 0)]
    near = {1.0: "Meridians converge: a degree of longitude gets shorter towards the pole."}
    return number(
        answer,
        cells[rows[0]] / cells[rows[1]],
        "It is nearly the cosine of the latitude. Counting pixels would flatter the north.",
        near,
        0.02,
    )


@exercise(
    "07.2",
    "Which of the written files still knows where on Earth it is?",
    "'png', 'geotiff' or 'csv'",
)
def _georeference(answer: Any) -> Verdict:
    return choice(
        answer,
        "geotiff",
        "It carries CRS and transform, and a colour table as well.",
        {
            "png": "It has colours and class ids, but no coordinates.",
            "csv": "It has areas, but no map.",
        },
    )
