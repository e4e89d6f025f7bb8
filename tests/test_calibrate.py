"""Statistics and biases that are set from data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rank_work import network, scene

from bigunet.calibrate import calibrate_bias, calibrate_norm, freeze_norm
from bigunet.errors import SceneError, SpecError
from bigunet.evaluate import evaluate
from bigunet.model import UNet
from bigunet.spec import UNetSpec
from bigunet.tile_reader import Sample, TileReader
from bigunet.tiles import whole_image


def test_norms_take_the_mean_and_variance_they_see() -> None:
    """Of one whole image, the first norm's statistics are those of the convolution's output."""
    image, labels = scene((32, 48))
    model = network(norm="batch", dropout=0.3).train()
    reader = TileReader.of(model.spec, image, labels)
    sample = Sample(whole_image((32, 48), model.spec))
    calibrate_norm(model, reader, [sample, sample])
    with torch.no_grad():
        seen = model.layers["enc0_conv0"](torch.from_numpy(image)[None])
    norm = model.layers["enc0_norm0"]
    torch.testing.assert_close(norm.running_mean, seen.mean((0, 2, 3)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm.running_var, seen.var((0, 2, 3)), rtol=1e-12, atol=1e-12)
    assert norm.momentum == 0.1
    assert not norm.training
    assert model.layers["enc0_drop0"].training
    # Normalised by these statistics, every map has mean 0 and deviation 1; not to the last
    # digit, as running variances are those of samples (n - 1).
    maps: list[torch.Tensor] = []
    model.layers["dec0_norm0"].register_forward_hook(lambda m, i, o: maps.append(o))
    with torch.no_grad():
        model.eval()(torch.from_numpy(image)[None])
    assert maps[0].mean((0, 2, 3)).abs().max() < 0.01
    torch.testing.assert_close(
        maps[0].std((0, 2, 3)), torch.ones(4, dtype=torch.float64), rtol=0.01, atol=0
    )


def test_without_norms_nothing_happens() -> None:
    image, labels = scene((32, 48))
    model = network()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    calibrate_norm(model, TileReader.of(model.spec, image, labels), [])
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_freezing_touches_norms_only() -> None:
    model = network(norm="batch", dropout=0.1).train()
    freeze_norm(model)
    assert not model.layers["mid_norm0"].training
    assert model.layers["mid_drop0"].training


def test_biases_undo_a_shift_of_the_logits() -> None:
    """A network that is right but for its biases is put right."""
    rng = np.random.default_rng(0)
    labels = rng.choice(3, (64, 64), p=(0.7, 0.25, 0.05)).astype(np.uint8)
    spec = UNetSpec(levels=1, convs=1, kernel=1, channels=3, classes=3)
    model = UNet(spec)
    with torch.no_grad():
        for name in ("mid_conv0", "head"):
            model.layers[name].weight.copy_(torch.eye(3)[:, :, None, None])
        model.layers["head"].bias.copy_(torch.tensor([0.0, 0.0, 3.0]))
    image = np.eye(3, dtype=np.float32)[labels].transpose(2, 0, 1)
    reader = TileReader.of(spec, image, labels)
    assert float(evaluate(model, reader)["mean_iou"]) < 0.1
    shifts = calibrate_bias(model, reader, num_pixels=2000)
    assert float(evaluate(model, reader)["mean_iou"]) == 1.0
    assert abs(float(shifts.mean())) < 1e-6
    assert shifts.argmin() == 2


def test_classes_left_out_do_not_count() -> None:
    """Where two classes compete and one is left out, the other may take all."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (64, 64)).astype(np.uint8)
    image = rng.standard_normal((1, 64, 64)).astype(np.float32)
    spec = UNetSpec(levels=1, convs=1, kernel=1, channels=2, classes=2, in_channels=1)
    for left_out, favoured in ((0, 1), (1, 0)):
        model = UNet(spec)
        reader = TileReader.of(spec, image, labels)
        calibrate_bias(model, reader, leave_out=(left_out,))
        predicted = evaluate(model, reader)["predicted_pixels"].values
        assert predicted[favoured] > 0.9 * predicted.sum()


def test_what_cannot_be_calibrated() -> None:
    image, labels = scene((32, 48))
    model = network(head_bias=False)
    with pytest.raises(SpecError, match="head has biases"):
        calibrate_bias(model, TileReader.of(model.spec, image, labels))
    model = network()
    nothing = np.full_like(labels, 255)
    with pytest.raises(SceneError, match="some pixels are labelled"):
        calibrate_bias(model, TileReader.of(model.spec, image, nothing))
