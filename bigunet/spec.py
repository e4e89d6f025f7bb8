"""What is to be built and how it is to be trained: two frozen values that everything else reads.

`UNetSpec` describes a network, `TrainSpec` one training run. Both check themselves when they are
made, collect every fault before raising, and turn into plain dicts and back without loss.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

from bigunet.errors import SpecError, fail
from bigunet.geometry import Margins, Upsampling, margins

__all__ = ["Activation", "Norm", "Padding", "Precision", "TrainSpec", "UNetSpec", "Upsampling"]

Norm = Literal["none", "batch", "group", "instance"]
Activation = Literal["relu", "leaky_relu", "gelu", "silu"]
Padding = Literal["zeros", "reflect", "replicate"]
Narrowing = Literal["up", "block"]
Precision = Literal["fp32", "bf16-autocast", "bf16"]
Optimiser = Literal["sgd", "momentum", "adam", "adamw"]
Recompute = Literal["none", "block", "stage", "except_last"]
Loss = Literal["cross_entropy", "dice", "cross_entropy+dice"]


def _check(errors: list[str], ok: bool, text: str) -> None:
    if not ok:
        errors.append(text)


def _is_int(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class _Spec:
    """Shared by the specs: dict round trip and one raise for all faults."""

    def _raise(self, errors: list[str]) -> None:
        if errors:
            name = type(self).__name__
            fail(SpecError, rule=f"{name}: " + "; ".join(errors), remedy="Change these fields.")

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, ready for YAML or JSON; `from_dict` is its inverse."""
        values = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The spec with these fields; unknown names raise `SpecError`."""
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        unknown = sorted(set(values) - known)
        if unknown:
            fail(
                SpecError,
                rule=f"{cls.__name__} has the fields {', '.join(sorted(known))}",
                got=", ".join(unknown),
                remedy="Remove or rename the unknown ones.",
            )
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked anew."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True, slots=True)
class UNetSpec(_Spec):
    """A U-Net: `levels` resolutions joined by 2 x 2 max-poolings, `convs` convolutions a block.

    Each unit of a block is convolution, dropout, normalisation, activation. The skip of a level
    is its encoder block's output, taken before the pooling and concatenated before the
    up-sampled map.

    Parameters
    ----------
    levels : resolutions; `levels - 1` poolings. At least 1.
    convs : convolutions in each block. At least 1.
    channels : width of the first level.
    kernel : side of the convolutions' square kernel, odd.
    in_channels, classes : bands of the image, channels of the output.
    growth : factor of the width from a level to the next one down.
    max_channels : upper bound of the width, or None.
    norm, affine : normalisation after each convolution, and whether it has weights.
    groups : groups of `norm="group"`; they must divide every width.
    activation, inplace : the activation, and whether it overwrites its input
        (relu and leaky_relu only).
    up : a transposed 2 x 2 convolution, or nearest or bilinear interpolation by 2.
    narrowing : who brings the width down on the way up: "up" narrows in the transposed
        convolution (in the following block where `up` interpolates, Ronneberger et al. 2015);
        "block" makes each block below put out the upper level's width (torchgpipe's U-Net).
    padding_mode : how convolutions continue the image at its border.
    dropout : probability that a channel is dropped while training.
    bias, head_bias : bias of the block's convolutions, and of the last 1 x 1 convolution.

    Raises
    ------
    SpecError : naming every field that breaks its rule.
    """

    levels: int = 5
    convs: int = 2
    channels: int = 64
    kernel: int = 3
    in_channels: int = 3
    classes: int = 2
    growth: float = 2.0
    max_channels: int | None = None
    norm: Norm = "none"
    affine: bool = True
    groups: int = 8
    activation: Activation = "relu"
    inplace: bool = True
    up: Upsampling = "transpose"
    narrowing: Narrowing = "up"
    padding_mode: Padding = "zeros"
    dropout: float = 0.0
    bias: bool = True
    head_bias: bool = True

    def __post_init__(self) -> None:
        errors: list[str] = []
        for name in ("levels", "convs", "channels", "kernel", "in_channels", "classes", "groups"):
            value = getattr(self, name)
            _check(errors, _is_int(value, 1), f"{name} is an integer >= 1, not {value!r}")
        for name, options in (
            ("norm", Norm),
            ("activation", Activation),
            ("up", Upsampling),
            ("padding_mode", Padding),
            ("narrowing", Narrowing),
        ):
            value, allowed = getattr(self, name), get_args(options)
            _check(
                errors, value in allowed, f"{name} is one of {', '.join(allowed)}, not {value!r}"
            )
        for name in ("affine", "inplace", "bias", "head_bias"):
            value = getattr(self, name)
            _check(errors, isinstance(value, bool), f"{name} is true or false, not {value!r}")
        ok = _is_number(self.growth) and self.growth >= 1
        _check(errors, ok, f"growth is a number >= 1, not {self.growth!r}")
        ok = self.max_channels is None or _is_int(self.max_channels, 1)
        _check(errors, ok, f"max_channels is null or an integer >= 1, not {self.max_channels!r}")
        ok = _is_number(self.dropout) and 0 <= self.dropout < 1
        _check(errors, ok, f"dropout is in [0, 1), not {self.dropout!r}")
        if not errors:
            _check(errors, self.kernel % 2 == 1, f"kernel is odd, not {self.kernel}")
            _check(errors, self.levels <= 16, f"levels is at most 16, not {self.levels}")
            if self.norm == "group":
                bad = [w for w in sorted(set(self.unit_widths)) if w % self.groups]
                _check(errors, not bad, f"groups ({self.groups}) divides every width, not {bad}")
        self._raise(errors)

    # Presets -----------------------------------------------------------------------------------

    @classmethod
    def torchgpipe(cls, convs: int, channels: int, *, depth: int = 5, classes: int = 1) -> UNetSpec:
        """The U-Net (B, C) of torchgpipe's benchmarks: `depth` poolings, C channels.

        Source: torchgpipe 0.0.5, benchmarks "U-Net (B, C)"; 362,157,516 parameters at (6, 72).
        """
        return cls(
            levels=depth + 1,
            convs=convs,
            channels=channels,
            classes=classes,
            norm="instance",
            affine=False,
            activation="leaky_relu",
            inplace=False,
            up="nearest",
            narrowing="block",
            dropout=0.1,
            bias=False,
            head_bias=False,
        )

    @classmethod
    def ronneberger2015(cls, in_channels: int = 1, classes: int = 2) -> UNetSpec:
        """The channels of the 2015 U-Net (64 to 1024, doi 10.1007/978-3-319-24574-4_28).

        Its convolutions are unpadded; here they are padded, so that output and image agree in size.
        """
        return cls(levels=5, convs=2, channels=64, in_channels=in_channels, classes=classes)

    # Widths ------------------------------------------------------------------------------------

    def width(self, level: int) -> int:
        """Channels of the encoder's block at `level` (0 at full resolution).

        Level -1 stands for the width that `narrowing="block"` ends with above the first level.
        """
        width = max(1, round(self.channels * self.growth**level))
        return width if self.max_channels is None else min(width, self.max_channels)

    @property
    def unit_widths(self) -> tuple[int, ...]:
        """Every width that a normalisation sees."""
        low = -1 if self.narrowing == "block" and self.levels > 1 else 0
        return tuple(self.width(level) for level in range(low, self.levels))

    # Geometry ----------------------------------------------------------------------------------

    @property
    def radius(self) -> int:
        """Pixels by which one block's convolutions reach on each side: `convs * (kernel // 2)`."""
        return self.convs * (self.kernel // 2)

    @property
    def stride(self) -> int:
        """Tile cores start on multiples of this, or the pooling lattice shifts: 2^(levels-1)."""
        return 1 << (self.levels - 1)

    @property
    def halo(self) -> int:
        """Exact reach of an output pixel into the image, in pixels on each side."""
        return self.margins.halo

    @property
    def margins(self) -> Margins:
        """Margins at every level, see `bigunet.geometry`."""
        return margins(self.levels, self.radius, self.up)

    @property
    def halo_aligned(self) -> int:
        """The halo rounded up to the stride."""
        return -(-self.halo // self.stride) * self.stride

    @property
    def tile_exact(self) -> bool:
        """Whether haloed tiles can equal the whole image; batch norm with frozen statistics."""
        return self.norm in ("none", "batch")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSpec(_Spec):
    """One training run: optimiser, precision, what is recomputed, the loss and its schedule.

    Parameters
    ----------
    optimiser, learning_rate, momentum, weight_decay : the update; `momentum` counts for
        "momentum" only.
    beta2 : decay of Adam's second moment.
    precision : "fp32", "bf16-autocast" (fp32 weights) or "bf16" (weights too).
    recompute : activations recomputed in the backward pass: none, of each block, of each stage,
        or of each stage except in the last micro-batch.
    batch : images (or tiles) in a step.
    tile : side of the square tile cores a step trains on, in pixels.
    halo : pixels read around a core; None is the network's own, which is exact. 0 trains on plain
        crops: faster, and wrong near their edges.
    focus : for each class how often a tile is placed around one of its pixels, relative to the
        others; None places tiles evenly.
    steps, warmup_steps : optimiser steps; the rate rises linearly, then falls as a cosine to
        `final_rate` times its peak.
    loss : what is minimised; `class_weights` weigh the classes, `label_smoothing` is PyTorch's.
    augment : random flips and quarter turns.
    jitter : standard deviation of a random factor and offset for each band of a tile, in units
        of the normalised image.
    freeze_norm : batch norm uses its running statistics as they are, which keeps tiles exact;
        otherwise it learns them from the tiles it sees.
    calibrate_bias : at the end, shift the last layer's biases so that the mean IoU over the
        training labels is largest.
    clip_norm : bound on the gradient's global norm, or None.
    average : decay of the exponential average of the weights, 0 for none.
    seed : of everything random.

    Raises
    ------
    SpecError : naming every field that breaks its rule.
    """

    optimiser: Optimiser = "adamw"
    learning_rate: float = 1e-3
    momentum: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 1e-4
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    batch: int = 1
    tile: int = 256
    halo: int | None = None
    focus: tuple[float, ...] | None = None
    steps: int = 100
    warmup_steps: int = 0
    final_rate: float = 0.01
    loss: Loss = "cross_entropy"
    class_weights: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    augment: bool = True
    jitter: float = 0.0
    freeze_norm: bool = True
    calibrate_bias: bool = False
    clip_norm: float | None = None
    average: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        errors: list[str] = []
        for name, low in (
            ("batch", 1),
            ("tile", 1),
            ("steps", 1),
            ("warmup_steps", 0),
            ("seed", 0),
        ):
            value = getattr(self, name)
            _check(errors, _is_int(value, low), f"{name} is an integer >= {low}, not {value!r}")
        for name, options in (
            ("optimiser", Optimiser),
            ("precision", Precision),
            ("recompute", Recompute),
            ("loss", Loss),
        ):
            value, allowed = getattr(self, name), get_args(options)
            _check(
                errors, value in allowed, f"{name} is one of {', '.join(allowed)}, not {value!r}"
            )
        for name, high in (
            ("momentum", 1.0),
            ("beta2", 1.0),
            ("jitter", math.inf),
            ("weight_decay", math.inf),
            ("final_rate", math.inf),
            ("label_smoothing", 1.0),
            ("average", 1.0),
        ):
            value = getattr(self, name)
            ok = _is_number(value) and 0 <= value < high
            _check(errors, ok, f"{name} is in [0, {high}), not {value!r}")
        ok = _is_number(self.learning_rate) and self.learning_rate > 0
        _check(errors, ok, f"learning_rate is > 0, not {self.learning_rate!r}")
        ok = self.clip_norm is None or (_is_number(self.clip_norm) and self.clip_norm > 0)
        _check(errors, ok, f"clip_norm is null or > 0, not {self.clip_norm!r}")
        ok = self.halo is None or _is_int(self.halo, 0)
        _check(errors, ok, f"halo is null or an integer >= 0, not {self.halo!r}")
        for name in ("class_weights", "focus"):
            values = getattr(self, name)
            if values is not None:
                ok = all(_is_number(v) and v >= 0 for v in values) and any(v > 0 for v in values)
                _check(errors, ok, f"{name} are >= 0, one > 0, not {values!r}")
        if not errors:
            ok = self.warmup_steps <= self.steps
            _check(
                errors, ok, f"warmup_steps ({self.warmup_steps}) is at most steps ({self.steps})"
            )
        self._raise(errors)
