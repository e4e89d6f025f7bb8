"""Random networks, images, tiles and ways of training, the same in every run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from bigunet.layers import layer_table
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import Tile, tile_image


class Case(NamedTuple):
    spec: UNetSpec
    shape: tuple[int, int, int, int]
    train: TrainSpec
    tile: Tile | None
    stages: tuple[int, ...] | None

    @property
    def how(self) -> dict[str, Any]:
        return {"tile": self.tile, "stages": self.stages}


def cases(seed: int, number: int) -> Iterator[Case]:
    draw = random.Random(seed)
    for _ in range(number):
        pick = draw.choice
        spec = UNetSpec(
            levels=pick((1, 2, 3, 4)),
            convs=pick((1, 2, 3)),
            channels=pick((8, 16)),
            kernel=pick((3, 3, 5)),
            in_channels=pick((1, 3)),
            classes=pick((2, 7)),
            norm=pick(("none", "batch", "group", "instance")),
            affine=pick((True, True, False)),
            groups=4,
            activation=pick(("relu", "leaky_relu", "gelu", "silu")),
            inplace=pick((True, False)),
            up=pick(("transpose", "nearest", "bilinear")),
            narrowing=pick(("up", "block")),
            padding_mode=pick(("zeros", "zeros", "reflect", "replicate")),
            dropout=pick((0.0, 0.1)),
            bias=pick((True, False)),
            head_bias=pick((True, False)),
        )
        train = TrainSpec(
            optimiser=pick(("sgd", "momentum", "adam", "adamw")),
            weight_decay=pick((0.0, 1e-4)),
            precision=pick(("fp32", "bf16-autocast", "bf16")),
            recompute=pick(("none", "block", "stage")),
            freeze_norm=pick((True, False)),
            loss=pick(("cross_entropy", "cross_entropy", "dice", "cross_entropy+dice")),
        )
        tile, sides = None, (pick((48, 50, 61)), pick((48, 57)))
        if pick((True, False)):
            tile = pick(tile_image((96, 80), max(16, spec.stride), spec))
            sides = tile.read.shape
        shape = (pick((1, 2)), spec.in_channels, *sides)
        stages = None
        if train.recompute == "stage" and pick((True, False)):
            layers = len(layer_table(spec, shape, tile=tile))
            first = draw.randint(1, layers - 2)
            stages = (first, layers - first)
        yield Case(spec, shape, train, tile, stages)
