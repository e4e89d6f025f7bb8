import dataclasses

import pytest

from bigunet.errors import SpecError
from bigunet.spec import TrainSpec, UNetSpec


def test_halo_stride_and_alignment():
    spec = UNetSpec(levels=5, convs=2, kernel=3)
    assert (spec.halo, spec.stride, spec.halo_aligned) == (94, 16, 96)
    assert UNetSpec(levels=3, up="bilinear").halo_aligned == 28


@pytest.mark.parametrize(
    ("norm", "exact"), [("none", True), ("batch", True), ("group", False), ("instance", False)]
)
def test_which_norms_are_exact_in_tiles(norm, exact):
    assert UNetSpec(norm=norm).tile_exact is exact


def test_presets():
    assert [UNetSpec.ronneberger2015().width(i) for i in range(5)] == [64, 128, 256, 512, 1024]
    gpipe = UNetSpec.torchgpipe(6, 72)
    assert gpipe.unit_widths == (36, 72, 144, 288, 576, 1152, 2304)
    assert UNetSpec(channels=10, growth=1.5, max_channels=20, levels=4).unit_widths == (
        10,
        15,
        20,
        20,
    )


@pytest.mark.parametrize("kind", [UNetSpec, TrainSpec])
def test_dict_round_trip(kind):
    changes = {"norm": "batch"} if kind is UNetSpec else {"class_weights": (1.0, 2.5), "steps": 7}
    spec = kind(**changes)
    assert kind.from_dict(spec.to_dict()) == spec
    assert hash(kind.from_dict(spec.to_dict())) == hash(spec)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(spec, next(iter(changes)), None)


def test_unknown_fields_are_named():
    with pytest.raises(SpecError, match="depth"):
        UNetSpec.from_dict({"depth": 5})


BAD = [
    ("levels", 0),
    ("levels", 2.0),
    ("levels", 17),
    ("levels", True),
    ("convs", -1),
    ("channels", 0),
    ("kernel", 4),
    ("kernel", "3"),
    ("in_channels", 0),
    ("classes", 0),
    ("growth", 0.5),
    ("growth", float("nan")),
    ("max_channels", 0),
    ("norm", "layer"),
    ("activation", "tanh"),
    ("up", "bicubic"),
    ("padding_mode", "circular"),
    ("narrowing", "none"),
    ("dropout", 1.0),
    ("bias", 1),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_field_is_named_with_its_value(field, value):
    with pytest.raises(SpecError) as seen:
        UNetSpec(**{field: value})
    assert field in str(seen.value)
    assert repr(value) in str(seen.value) or str(value) in str(seen.value)


BAD_TRAIN = [
    ("optimiser", "lion"),
    ("precision", "fp16"),
    ("recompute", "all"),
    ("loss", "focal"),
    ("learning_rate", 0.0),
    ("steps", 0),
    ("batch", 0),
    ("warmup_steps", 101),
    ("average", 1.0),
    ("class_weights", (0.0, 0.0)),
    ("class_weights", (-1.0, 1.0)),
    ("clip_norm", 0.0),
]


@pytest.mark.parametrize(("field", "value"), BAD_TRAIN)
def test_a_bad_training_field_is_named(field, value):
    with pytest.raises(SpecError, match=field):
        TrainSpec(**{field: value})


def test_all_faults_are_reported_at_once():
    with pytest.raises(SpecError) as seen:
        UNetSpec(levels=0, kernel=-3, norm="x")
    assert all(name in str(seen.value) for name in ("levels", "kernel", "norm"))


def test_groups_must_divide_every_width():
    with pytest.raises(SpecError, match="groups"):
        UNetSpec(norm="group", groups=8, channels=12)
