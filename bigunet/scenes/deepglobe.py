"""A folder of image and mask pairs in the layout of the DeepGlobe land cover challenge.

Layout: `<id>_sat.jpg` (RGB), `<id>_mask.png` (RGB colours of classes), `class_dict.csv`. From the
data set's notes (Demir et al., "DeepGlobe 2018", CVPR Workshops 2018): mask values are not exactly
0 and 255 and are to be binarised at 128; the class "unknown" (black) does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

from ..errors import SceneError, fail
from .classes import ClassTable
from .formats import open_reader
from .labels import ColourLabels, as_labels
from .open import open_scene
from .pairs import ScenePair, pair

__all__ = ["DEEPGLOBE_CLASSES", "DeepGlobe", "open_deepglobe"]

#: The data set's own colours; taken where a folder has no class_dict.csv.
DEEPGLOBE_CLASSES = ClassTable(
    ("urban_land", "agriculture_land", "rangeland", "forest_land", "water", "barren_land"),
    ("#00ffff", "#ffff00", "#ff00ff", "#00ff00", "#0000ff", "#ffffff"),
    ignore_colours=("#000000",),
)
_IMAGE, _MASK = "_sat.jpg", "_mask.png"


class DeepGlobe(Sequence[ScenePair]):
    """The pairs of a folder, ordered by id, each opened when it is asked for."""

    def __init__(self, folder: Path, ids: tuple[str, ...], classes: ClassTable) -> None:
        self.folder, self.ids, self.classes = folder, ids, classes

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> ScenePair: ...
    @overload
    def __getitem__(self, index: slice) -> DeepGlobe: ...
    def __getitem__(self, index: int | slice) -> ScenePair | DeepGlobe:
        if isinstance(index, slice):
            return DeepGlobe(self.folder, self.ids[index], self.classes)
        name = self.ids[index]
        image = open_scene(self.folder / f"{name}{_IMAGE}")
        mask = open_reader(self.folder / f"{name}{_MASK}")
        if mask.shape[0] != 3:
            fail(
                SceneError,
                rule="a DeepGlobe mask is an RGB image",
                got=f"{mask.shape[0]} bands in {mask.path}",
                remedy="Save it as RGB, or open ids with open_labels",
            )
        labels = as_labels(
            ColourLabels(mask, self.classes, threshold=128), self.classes.ignore, self.classes
        )
        return pair(image, labels, check=False)

    def __iter__(self) -> Iterator[ScenePair]:
        return (self[i] for i in range(len(self)))


def open_deepglobe(folder: str | Path) -> DeepGlobe:
    """The image and mask pairs of a folder, as a lazy sequence ordered by id.

    Classes come from `class_dict.csv` where the folder has it (its row "unknown" is ignored).
    Masks are binarised at 128. Raises `SceneError` where the folder has no pair, and where an
    image lacks its mask or a mask its image, naming them all.
    """
    folder = Path(folder)
    images = {p.name[: -len(_IMAGE)] for p in folder.glob(f"*{_IMAGE}")}
    masks = {p.name[: -len(_MASK)] for p in folder.glob(f"*{_MASK}")}
    if not images | masks:
        fail(
            SceneError,
            rule=f"a DeepGlobe folder holds <id>{_IMAGE} and <id>{_MASK}",
            got=f"none in {folder}" if folder.is_dir() else f"no folder {folder}",
            remedy="Name the folder that holds the pairs, for example its 'train' folder",
        )
    if images != masks:
        lone = [f"{i}{_MASK}" for i in sorted(images - masks)]
        lone += [f"{i}{_IMAGE}" for i in sorted(masks - images)]
        fail(
            SceneError,
            rule="every image needs its mask, and every mask its image",
            got=f"missing {', '.join(lone[:10])}{' ...' if len(lone) > 10 else ''} in {folder}",
            remedy="Add the missing files, or remove their partners; the data set's own validation "
            "and test folders come without masks: open those images with open_scene",
        )
    table = folder / "class_dict.csv"
    classes = ClassTable.from_file(table) if table.is_file() else DEEPGLOBE_CLASSES
    return DeepGlobe(folder, tuple(sorted(images)), classes)
