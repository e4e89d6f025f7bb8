"""Scores by tiles against the whole image's labels."""

from __future__ import annotations

import numpy as np
import torch
from rank_work import network, scene

from bigunet.evaluate import evaluate
from bigunet.metrics import Confusion
from bigunet.tile_reader import TileReader


def test_tiles_score_what_the_whole_image_does() -> None:
    image, labels = scene()
    model = network(norm="batch", dropout=0.5).train()
    model.layers["enc0_norm0"].eval()
    before = {module: module.training for module in model.modules()}
    table = evaluate(model, TileReader.of(model.spec, image, labels), tile=18)
    assert {module: module.training for module in model.modules()} == before
    with torch.no_grad():
        predicted = model.eval()(torch.from_numpy(image)[None])[0].argmax(0).numpy()
    expected = Confusion(4)
    expected.add(predicted, labels)
    np.testing.assert_array_equal(table["confusion"], expected.matrix)
    assert int(table["pixels"]) == (labels != 255).sum()


def test_a_small_image_is_one_tile() -> None:
    image, labels = scene((30, 41))
    model = network()
    table = evaluate(model, TileReader.of(model.spec, image, labels))
    assert int(table["pixels"]) == (labels != 255).sum()
