"""The course's exercises, which check an answer and say what is amiss without giving it away.

    check("01.1", None)   # the question
    check("01.1", 564)    # a verdict, which a notebook shows as text

The right answer is computed by the library, not stored, wherever there is something to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bigunet.areas import row_areas_km2
from bigunet.errors import BigUNetError, SpecError, fail
from bigunet.geometry import closed_form_halo
from bigunet.handover import Handover
from bigunet.scenes import EARTH_SHAPE, earth
from bigunet.schedule import bubble_fraction
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import count_tiles, tile_image
from bigunet.views.memory import memory_by_depth, memory_tables

__all__ = ["EXERCISES", "Exercise", "Verdict", "check"]

_Body = Callable[[Any], "Verdict"]


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right (None: not answered yet), and why. A notebook shows the text."""

    right: bool | None
    text: str

    def __repr__(self) -> str:
        word = {True: "Right", False: "Not yet", None: "Not answered yet"}[self.right]
        return f"{word}. {self.text}"


@dataclass(frozen=True)
class Exercise:
    """A question, what an answer looks like, and the check of it.

    `key` is the notebook's number and the exercise's: "01.2".
    """

    key: str
    question: str
    form: str
    body: _Body

    def check(self, answer: Any) -> Verdict:
        """The verdict on an answer; one of the wrong kind is told what kind is meant."""
        if answer is None:
            return Verdict(None, f"{self.question} Set answer to {self.form}.")
        try:
            return self.body(answer)
        except BigUNetError as error:
            return Verdict(False, f"That cannot be: {error}")
        except (TypeError, ValueError, AttributeError, KeyError):
            return Verdict(False, f"An answer here is {self.form}.")


#: All exercises by their key, in the course's order.
EXERCISES: dict[str, Exercise] = {}


def check(key: str, answer: Any) -> Verdict:
    """The verdict on an answer to an exercise of the course; `None` gives the question again.

    Raises
    ------
    SpecError : for a key that is not in `EXERCISES`.
    """
    if key not in EXERCISES:
        fail(
            SpecError,
            rule=f"the exercises are {', '.join(EXERCISES)}",
            got=key,
            remedy="Use one of these.",
        )
    return EXERCISES[key].check(answer)


def _exercise(key: str, question: str, form: str) -> Callable[[_Body], _Body]:
    def add(body: _Body) -> _Body:
        EXERCISES[key] = Exercise(key, question, form, body)
        return body

    return add


def _number(
    answer: Any,
    truth: float,
    right: str,
    near: Mapping[Any, str] | None = None,
    tolerance: float = 1e-6,
) -> Verdict:
    """Right within a relative tolerance; `near` has hints for answers that are often given."""
    if isinstance(answer, bool):
        raise TypeError
    given = float(answer)
    if abs(given - truth) <= tolerance * max(1.0, abs(truth)):
        return Verdict(True, right)
    for value, hint in (near or {}).items():
        if abs(given - value) <= tolerance * max(1.0, abs(value)):
            return Verdict(False, hint)
    return Verdict(False, "Too large." if given > truth else "Too small.")


def _choice(answer: Any, truth: str, right: str, others: Mapping[str, str]) -> Verdict:
    """One of a few words; `others` has a hint for each wrong one."""
    word = str(answer).strip().lower()
    if word == truth:
        return Verdict(True, right)
    if word in others:
        return Verdict(False, others[word])
    raise ValueError


# 00 ---------------------------------------------------------------------------------------------


@_exercise(
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
    return _number(
        answer, across**2, "With 384 it is far less: small tiles read mostly halo.", near, 0.01
    )


@_exercise(
    "00.2",
    "Where do the mosaic's errors gather?",
    "'tile edges' or 'class borders'",
)
def _errors_gather(answer: Any) -> Verdict:
    return _choice(
        answer,
        "class borders",
        "The halo makes each pixel see what it would see in the whole image.",
        {"tile edges": "Switch the tile grid on in the viewer: does the error follow its lines?"},
    )


@_exercise(
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


@_exercise(
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
    return _number(answer, spec.halo, "Interval arithmetic and the closed form agree.", near)


@_exercise(
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


@_exercise(
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
    return _number(
        answer,
        wide.halo - spec.halo,
        "Each level's neighbour is worth twice as much on the level above.",
        near,
    )


# 02 ---------------------------------------------------------------------------------------------


@_exercise(
    "02.1",
    "Which three ways put an image of 10,000 x 10,000 pixels on a device of 16 GB?",
    "a list of three MemoryState(spec, train, image, tile, device)",
)
def _three_ways(answer: Sequence[Any]) -> Verdict:
    faults = []
    for number, way in enumerate(answer, start=1):
        data = memory_tables(way)
        over = int(data["peak"][0]) - int(data.attrs["capacity_bytes"])
        if way.image < 10_000:
            faults.append(f"way {number} has a smaller image")
        elif way.device != "V100-16GB":
            faults.append(f"way {number} is for another device")
        elif over > 0:
            faults.append(f"way {number} is {over / 2**30:.1f} GiB over")
    kinds = {(way.spec, way.train, way.tile > 0) for way in answer}
    if len(answer) < 3 or len(kinds) < 3:
        faults.append("they must be three that differ in more than the tile's side")
    if all(way.tile for way in answer):
        faults.append("one of them does without tiles (tile 0)")
    if faults:
        text = "; ".join(faults)
        return Verdict(False, f"{text[0].upper()}{text[1:]}.")
    return Verdict(True, "All three fit.")


@_exercise(
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
    return _number(
        answer, truth, "A level more has four times the parameters; its maps hardly count.", near
    )


@_exercise(
    "02.3",
    "With each block recomputed and the whole image, where is the peak?",
    "'first encoder block', 'bottleneck' or 'last decoder block'",
)
def _peak_where(answer: Any) -> Verdict:
    return _choice(
        answer,
        "last decoder block",
        "There the block's own maps are alive again, beside all that waits for the encoder.",
        {
            "first encoder block": "It is as wide, but by its backward pass most is freed.",
            "bottleneck": "Its maps are the smallest of all. See the plot of the step.",
        },
    )


# 03 ---------------------------------------------------------------------------------------------


@_exercise(
    "03.1",
    "A scene of 200 x 232 pixels in tiles of 96: how many pixels does the smallest answer for?",
    "a number of pixels",
)
def _smallest_tile(answer: Any) -> Verdict:
    areas = sorted({t.write.area for t in tile_image((200, 232), 96, Handover().spec)})
    near = dict.fromkeys(areas[1:], "One tile is smaller still: look at the corner.")
    return _number(answer, areas[0], "Its weight in the loss is that of its pixels, no more.", near)


@_exercise(
    "03.2",
    "Rank 0 has 100 labelled pixels of mean loss 1, rank 1 has 900 of mean loss 2. What is the "
    "image's mean loss?",
    "a number",
)
def _mean_of_means(answer: Any) -> Verdict:
    near = {1.5: "That is the mean of means: each pixel of rank 0 would count nine times."}
    return _number(
        answer,
        (100 * 1 + 900 * 2) / 1000,
        "So every rank divides by the count of all ranks.",
        near,
        1e-3,
    )


@_exercise(
    "03.3",
    "Which network is not exact in tiles, whatever their halo?",
    "a network, UNetSpec(norm=...)",
)
def _not_exact(answer: UNetSpec) -> Verdict:
    if answer.tile_exact:
        return Verdict(False, f'With norm="{answer.norm}" a haloed tile equals the whole image.')
    return Verdict(True, "It depends on the extent that it sees, so an exact step refuses it.")


# 04 ---------------------------------------------------------------------------------------------


@_exercise(
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
    return _number(
        answer, truth, "(K - 1) / (M + K - 1) falls slowly, and micro-batches cost kernels."
    )


@_exercise(
    "04.2",
    "Which loss of time does a U-Net have that a plain stack of equal layers has not?",
    "'bubble', 'transfer of skips' or 'kernel starts'",
)
def _lost(answer: Any) -> Verdict:
    return _choice(
        answer,
        "transfer of skips",
        "And the largest are made first and joined last.",
        {
            "bubble": "Every pipeline has one, whatever its layers.",
            "kernel starts": "Every network pays those, and more with smaller micro-batches.",
        },
    )


# 05 ---------------------------------------------------------------------------------------------


@_exercise(
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
    return _number(answer, tiles / (gpus * most), "Smaller tiles deal out more evenly.", near, 0.01)


@_exercise(
    "05.2",
    "In weak scaling, which part of a sample-parallel step still grows with the GPUs?",
    "'compute', 'halo redundancy' or 'all-reduce'",
)
def _weak_growth(answer: Any) -> Verdict:
    same = "Each GPU has as many tiles of its own as before."
    return _choice(
        answer,
        "all-reduce",
        "More members, more messages, one after the other.",
        {"compute": same, "halo redundancy": same},
    )


@_exercise(
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
    return _number(
        answer, 2 * 999 / 1000, "It hardly depends on their number; latency does.", near, 0.002
    )


# 06 ---------------------------------------------------------------------------------------------


@_exercise(
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
    return _number(
        answer,
        -(-share // 4),
        "A pass that is not full is filled up with tiles that count nothing.",
        near,
    )


@_exercise(
    "06.2",
    "What do two pipelines of a step send each other?",
    "'maps', 'skips' or 'gradients'",
)
def _between_pipelines(answer: Any) -> Verdict:
    inside = "These travel between the stages of one pipeline."
    return _choice(
        answer,
        "gradients",
        "Once a step, of each stage, summed over its copies.",
        {"maps": inside, "skips": inside},
    )


@_exercise(
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
    return _number(
        answer,
        2,
        "The fewest that fit; the rest as pipelines: an all-reduce costs less than a bubble.",
        near,
    )


# 07 ---------------------------------------------------------------------------------------------


@_exercise(
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
    return _number(
        answer,
        cells[rows[0]] / cells[rows[1]],
        "It is nearly the cosine of the latitude. Counting pixels would flatter the north.",
        near,
        0.02,
    )


@_exercise(
    "07.2",
    "Which of the written files still knows where on Earth it is?",
    "'png', 'geotiff' or 'csv'",
)
def _georeference(answer: Any) -> Verdict:
    return _choice(
        answer,
        "geotiff",
        "It carries CRS and transform, and a colour table as well.",
        {
            "png": "It has colours and class ids, but no coordinates.",
            "csv": "It has areas, but no map.",
        },
    )
