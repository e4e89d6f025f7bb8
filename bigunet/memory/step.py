"""One training step, replayed tensor by tensor: what each layer makes, keeps and frees, and when.

The rules are those of PyTorch's autograd for the operations that `bigunet.model` calls
(`derivatives.yaml`: a convolution keeps its input, a normalisation its input and statistics, an
activation its input or its result, a pooling its input and its int64 indices; dropout its mask of
a number a channel; up-sampling by interpolation and concatenation nothing). Gradients flow as the
engine passes them: a layer's gradients of output and input live together, and the gradient of a
skip is a view that keeps the whole gradient of its concatenation alive until the encoder's
pooling adds to it. Work space inside a kernel (cuDNN's, oneDNN's) is counted on
request only.
"""

from __future__ import annotations

from collections.abc import Sequence

from bigunet.layers import LayerRow
from bigunet.memory.causes import (
    CASTS,
    GRADIENTS,
    SKIPS,
    TEMPORARIES,
    ACTIVATIONS,
    Format,
    parameter_counts,
)
from bigunet.memory.tape import Tape
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import Tile

__all__ = [
    "BACKWARD",
    "FORWARD",
    "LOSS",
    "OPTIMISE",
    "PHASES",
    "RECOMPUTE",
    "WINOGRAD_RATIO",
    "Replay",
]

PHASES = ("forward", "loss", "recompute", "backward", "optimiser")
FORWARD, LOSS, RECOMPUTE, BACKWARD, OPTIMISE = range(5)
WINOGRAD_RATIO = 4
"""Winograd's F(4x4, 3x3) turns the 9 numbers of a 3 x 3 filter into 36 (Lavin and Gray,
arXiv 1509.09308); its non-fused form holds all transformed filters in work space."""


class Replay:
    """Replays layers on a tape. Layer numbers are positions in `rows`.

    `fake` follows fake tensors where they differ from real ones: a gradient is then never added
    in place, and group norm's backward works in the weight's precision. `workspace` counts the
    filters that a Winograd convolution transforms.
    """

    def __init__(
        self,
        spec: UNetSpec,
        train: TrainSpec,
        rows: Sequence[LayerRow],
        form: Format,
        tile: Tile | None = None,
        *,
        fake: bool = False,
        workspace: bool = False,
    ) -> None:
        self.spec, self.train, self.rows, self.form, self.tile = spec, train, rows, form, tile
        self.fake = fake
        self.winograd = WINOGRAD_RATIO if workspace and spec.kernel == 3 else 0
        self.tape = Tape(form.quantum)
        self.skip_shapes = {row.name: row.out_shape for row in rows if row.kind == "skip"}
        self.skips: dict[str, int] = {}
        self.skip_gradients: dict[str, tuple[int, bool]] = {}
        self.saved: dict[int, tuple[int, ...]] = {}
        self.cache: list[int] = []
        self.gradients: set[int] = set()
        self.micro_batch = 0
        # Events so far when the loss was known, and the storage of its value.
        self.after_loss = 0
        self.value_of_loss = -1
        # The image needs no gradient: neither does a first convolution's input.
        self.input_row = 0
        self.forwards = {
            "conv": self._conv,
            "head": self._conv,
            "dropout": self._dropout,
            "norm": self._norm,
            "activation": self._activation,
            "skip": self._skip,
            "pool": self._pool,
            "up": self._up,
            "concat": self._concat,
        }
        self.backwards = {
            "conv": self._conv_back,
            "head": self._conv_back,
            "dropout": self._plain_back,
            "norm": self._norm_back,
            "activation": self._activation_back,
            "skip": self._skip_back,
            "pool": self._pool_back,
            "up": self._up_back,
            "concat": self._concat_back,
        }
        self.in_place = spec.inplace and spec.activation in ("relu", "leaky_relu")
        self.keeps_result = self.in_place or spec.activation == "relu"
        self.on_view = self.in_place and spec.norm == "instance"
        self.padded = spec.padding_mode != "zeros"
        # CPU autocast runs reflect and replicate padding in fp32.
        self.wide_padding = self.padded and form.autocast and not form.cuda
        self.value = form.value
        # Of the result of layers that keep only what comes before it; 0 where recomputation ends
        # with such a layer, as its result then never comes to be.
        self.out_value = form.value

    # Forward ------------------------------------------------------------------------------------

    def forward(self, start: int, stop: int, x: int, phase: int, keep: bool) -> int:
        """Run rows `start` to `stop` from storage `x`, whose holder passes on."""
        rows, tape, forwards, saved = self.rows, self.tape, self.forwards, self.saved
        tape.kept_as = ACTIVATIONS if keep else TEMPORARIES
        micro_batch, events, ops = self.micro_batch, tape.events, tape.ops
        for i in range(start, stop):
            row = rows[i]
            tape.row = i
            ops.append((len(events), i, phase, micro_batch))
            x, kept = forwards[row.kind](i, row, x)
            if keep:
                saved[i] = kept
            else:
                for number in kept:
                    tape.drop(number)
        return x

    def _conv(self, i: int, row: LayerRow, x: int) -> tuple[int, tuple[int, ...]]:
        tape = self.tape
        kept: tuple[int, ...] = ()
        source = x
        passing: tuple[int, ...] = ()
        first = i == self.input_row
        if self.padded and row.kind == "conv":
            source, passing, kept = self._pad(row, x, first)
        if self.form.autocast:
            weight = self._cast_weights(i, row)
            if first and not passing:
                # The image itself arrives in fp32.
                source = tape.new(_count(row.in_shape) * self.value)
                passing = (source,)
            kept = (*kept, tape.keep(source), weight)
        else:
            kept = (*kept, tape.keep(source))
        out = tape.new(_count(row.out_shape) * self.out_value)
        if self.winograd and row.kind == "conv":
            self._transform(row)
        # The caller holds the padded map, and autocast its copy, until the result is there.
        for number in passing:
            tape.drop(number)
        tape.drop(x)
        return out, kept

    def _transform(self, row: LayerRow) -> None:
        weights = row.in_shape[1] * row.out_shape[1] * 9
        self.tape.drop(self.tape.new(self.winograd * weights * self.value))

    def _pad(
        self, row: LayerRow, x: int, first: bool
    ) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """The padded map as the convolution takes it, what goes after it, what the padding keeps.

        Padding keeps its input unless that is the image, whose gradient nobody needs.
        """
        tape, value = self.tape, self.value
        count = _padded(row.in_shape, self.spec.kernel)
        kept: tuple[int, ...] = ()
        if self.wide_padding and not first:
            wide = tape.new(_count(row.in_shape) * 4)
            kept = (tape.keep(wide),)
            padded = tape.new(count * 4)
            tape.drop(wide)
        else:
            if not first:
                kept = (tape.keep(x),)
            padded = tape.new(count * (4 if first and self.form.autocast else value))
        if self.form.autocast and (first or self.wide_padding):
            cast = tape.new(count * value)
            return cast, (padded, cast), kept
        return padded, (padded,), kept

    def _cast_weights(self, i: int, row: LayerRow) -> int:
        """Casts stay in autocast's cache until the forward pass ends."""
        tape = self.tape
        counts = parameter_counts(self.spec, row)
        weight = tape.new(counts[0] * 2, CASTS)
        self.cache.append(weight)
        for count in counts[1:]:
            self.cache.append(tape.new(count * 2, CASTS))
        return tape.keep(weight)

    def end_autocast(self) -> None:
        for number in self.cache:
            self.tape.drop(number)
        self.cache.clear()

    def _dropout(self, i: int, row: LayerRow, x: int) -> tuple[int, tuple[int, ...]]:
        tape, value = self.tape, self.value
        batch, width, _, _ = row.out_shape
        mask = tape.new(batch * width * value, tape.kept_as)
        out = tape.new(_count(row.out_shape) * self.out_value)
        tape.drop(x)
        return out, (mask,)

    def _norm(self, i: int, row: LayerRow, x: int) -> tuple[int, tuple[int, ...]]:
        tape, spec = self.tape, self.spec
        batch, width, _, _ = row.out_shape
        statistics = self.form.weight
        kept: tuple[int, ...] = (tape.keep(x),)
        repeated = -1
        if spec.norm == "instance":
            count = batch * width
            if spec.affine:
                kept = (*kept, tape.new(count * self.form.weight, tape.kept_as))
                repeated = tape.new(count * self.form.weight)
        elif spec.norm == "group":
            count = batch * spec.groups
        else:
            count = 0 if self.train.freeze_norm else width
        out = tape.new(_count(row.out_shape) * self.value)
        if count:
            kept = (
                *kept,
                tape.new(count * statistics, tape.kept_as),
                tape.new(count * statistics, tape.kept_as),
            )
        if repeated >= 0:
            tape.drop(repeated)
        tape.drop(x)
        return out, kept

    def _activation(self, i: int, row: LayerRow, x: int) -> tuple[int, tuple[int, ...]]:
        tape = self.tape
        if self.in_place:
            return x, (tape.keep(x),)
        if self.keeps_result:
            out = tape.new(_count(row.out_shape) * self.value)
            kept = tape.keep(out)
        else:
            kept = tape.keep(x)
            out = tape.new(_count(row.out_shape) * self.out_value)
        tape.drop(x)
        return out, (kept,)

    def _skip(self, i: int, row: LayerRow, x: int) -> tuple[int, tuple[int, ...]]:
        tape = self.tape
        tape.refs[x] += 1
        tape.cause[x] = SKIPS
        tape.keeper[x] = i
        self.skips[row.name] = x
        return x, ()

    def _pool(self, i: int, row: LayerRow, x: int) -> tuple[int, tuple[int, ...]]:
        tape = self.tape
        count = _count(row.out_shape)
        kept = tape.keep(x)
        out = tape.new(count * self.value)
        indices = tape.new(count * 8, tape.kept_as)
        tape.drop(x)
        return out, (kept, indices)

    def _up(self, i: int, row: LayerRow, x: int) -> tuple[int, tuple[int, ...]]:
        tape = self.tape
        kept: tuple[int, ...] = ()
        if self.spec.up == "transpose":
            kept = (tape.keep(x),)
            if self.form.autocast:
                kept = (*kept, self._cast_weights(i, row))
        out = tape.new(_upsampled(row) * self.value)
        tape.drop(x)
        return out, kept

    def _concat(self, i: int, row: LayerRow, x: int) -> tuple[int, tuple[int, ...]]:
        tape = self.tape
        assert row.source is not None
        out = tape.new(_count(row.out_shape) * self.value)
        tape.drop(self.skips.pop(row.source))
        tape.drop(x)
        return out, ()

    # Loss ---------------------------------------------------------------------------------------

    def loss(self, logits: int, pixels: int) -> int:
        """Loss and its backward; returns the gradient of the logits of `pixels` pixels.

        `bigunet.losses` works in fp32: cross-entropy keeps the logarithms of the softmax.
        """
        tape, kinds = self.tape, self.train.loss
        tape.op(len(self.rows) - 1, LOSS, self.micro_batch)
        count, narrow = pixels * self.spec.classes, self.value < 4
        if narrow:
            wide = tape.new(count * 4)
            tape.drop(logits)
            logits = wide
        entropy: tuple[int, ...] = ()
        dice: tuple[int, ...] = ()
        if "cross_entropy" in kinds:
            # The logarithms, and the sum of the pixels' weights.
            entropy = tape.new(count * 4, ACTIVATIONS), tape.new(4, ACTIVATIONS)
        if "dice" in kinds:
            # Probabilities, true classes, which pixels are labelled, and each one's probability.
            sizes = (count * 4, pixels * 8, pixels, pixels * 4)
            dice = tuple([tape.new(size, ACTIVATIONS) for size in sizes])
            tape.drop(tape.new(count * 4))
        tape.drop(logits)
        value = tape.new(4)
        self.end_autocast()
        self.after_loss = len(tape.events)
        tape.op(len(self.rows) - 1, BACKWARD, self.micro_batch)
        gradient = self._dice_back(dice, count, pixels) if dice else -1
        if entropy:
            gradient = self._entropy_back(entropy, count, gradient)
        if narrow:
            cast = tape.new(count * self.value)
            tape.drop(gradient)
            gradient = cast
        self.value_of_loss = value
        return gradient

    def _entropy_back(self, kept: tuple[int, ...], count: int, other: int) -> int:
        tape = self.tape
        first = tape.new(count * 4)
        gradient = tape.new(count * 4)
        tape.drop(first)
        for number in kept:
            tape.drop(number)
        return gradient if other < 0 else self._sum(other, gradient, count * 4)

    def _dice_back(self, kept: tuple[int, ...], count: int, pixels: int) -> int:
        """Through the sum over all pixels, then through each pixel's true class."""
        tape = self.tape
        probabilities, truth, labelled, own = kept
        total = tape.new(count * 4)
        hit = tape.new(pixels * 4)
        # Back through: labelled or not; the cut out of the gathered map; the gathering.
        for size in (pixels, pixels, count):
            following = tape.new(size * 4)
            tape.drop(hit)
            hit = following
        tape.drop(labelled)
        total = self._sum(total, hit, count * 4)
        gradient = tape.new(count * 4)
        tape.drop(total)
        for number in (probabilities, truth, own):
            tape.drop(number)
        return gradient

    def _sum(self, first: int, second: int, nbytes: int) -> int:
        """Two gradients of one tensor: the second is added to the first in place."""
        tape = self.tape
        if not self.fake:
            tape.drop(second)
            return first
        total = tape.new(nbytes)
        tape.drop(first)
        tape.drop(second)
        return total

    def crop_back(self, gradient: int, before: tuple[int, int], after: tuple[int, int], n: int) -> int:
        """Backward of cutting (height, width) `before` to `after`, `n` maps: zeros, then a copy.

        Torch cuts one axis after the other, and an axis that is whole not at all.
        """
        tape, value = self.tape, self.value
        if before[1] != after[1]:
            wider = tape.new(n * after[0] * before[1] * value)
            tape.drop(gradient)
            gradient = wider
        if before[0] != after[0]:
            higher = tape.new(n * before[0] * before[1] * value)
            tape.drop(gradient)
            gradient = higher
        return gradient

    # Backward -----------------------------------------------------------------------------------

    def backward(self, start: int, stop: int, gradient: int) -> int:
        """Rows `stop - 1` down to `start`; takes and returns the gradient that flows (or -1)."""
        rows, tape, backwards, saved = self.rows, self.tape, self.backwards, self.saved
        micro_batch, events, ops = self.micro_batch, tape.events, tape.ops
        for i in range(stop - 1, start - 1, -1):
            row = rows[i]
            tape.row = i
            ops.append((len(events), i, BACKWARD, micro_batch))
            gradient = backwards[row.kind](i, row, gradient, saved.pop(i))
        return gradient

    def _plain_back(self, i: int, row: LayerRow, g: int, kept: tuple[int, ...]) -> int:
        tape = self.tape
        gradient = tape.new(_count(row.in_shape) * self.value)
        tape.drop(g)
        for number in kept:
            tape.drop(number)
        return gradient

    def _accumulate(self, i: int, row: LayerRow, made: list[int]) -> None:
        """Hand weights' gradients to the parameters: the first is kept, others are added."""
        tape = self.tape
        if i in self.gradients:
            for number in made:
                tape.drop(number)
        else:
            for number in made:
                tape.cause[number] = GRADIENTS
                tape.keeper[number] = i

    def _weights_back(self, i: int, row: LayerRow, g: int, kept: tuple[int, ...]) -> None:
        """Gradients of weight and bias, once the layer's backward has run."""
        tape, form = self.tape, self.form
        counts = parameter_counts(self.spec, row)
        made = [tape.new(count * self.value) for count in counts]
        if self.winograd and row.kind == "conv":
            self._transform(row)
        tape.drop(g)
        for number in kept:
            tape.drop(number)
        if form.autocast:
            for j, count in enumerate(counts):
                wide = tape.new(count * 4)
                tape.drop(made[j])
                made[j] = wide
                self._accumulate(i, row, [wide])
        else:
            self._accumulate(i, row, made)
        self.done(i)

    def done(self, i: int) -> None:
        self.gradients.add(i)

    def _conv_back(self, i: int, row: LayerRow, g: int, kept: tuple[int, ...]) -> int:
        tape, value = self.tape, self.value
        if i == self.input_row:
            self._weights_back(i, row, g, kept)
            return -1
        if not (self.padded and row.kind == "conv"):
            gradient = tape.new(_count(row.in_shape) * value)
            self._weights_back(i, row, g, kept)
            return gradient
        count, inner = _padded(row.in_shape, self.spec.kernel), _count(row.in_shape)
        gradient = tape.new(count * value)
        self._weights_back(i, row, g, kept[1:])
        if self.wide_padding:
            wide = tape.new(count * 4)
            tape.drop(gradient)
            narrow = tape.new(inner * 4)
            tape.drop(wide)
            tape.drop(kept[0])
            gradient = tape.new(inner * value)
            tape.drop(narrow)
            return gradient
        narrow = tape.new(inner * value)
        tape.drop(gradient)
        tape.drop(kept[0])
        return narrow

    def _norm_back(self, i: int, row: LayerRow, g: int, kept: tuple[int, ...]) -> int:
        tape, spec, form = self.tape, self.spec, self.form
        count = _count(row.in_shape)
        batch, width, _, _ = row.out_shape
        wide = self.fake and spec.norm == "group" and form.autocast and spec.affine
        gradient = tape.new(count * (4 if wide else self.value))
        made: list[int] = []
        if spec.affine:
            each = batch * width if spec.norm == "instance" else width
            made = [tape.new(each * form.weight) for _ in range(2)]
        tape.drop(g)
        for number in kept:
            tape.drop(number)
        if spec.affine and spec.norm == "instance":
            sums = []
            for number in made:
                sums.append(tape.new(width * form.weight))
                tape.drop(number)
            made = sums
        if made:
            self._accumulate(i, row, made)
            self.done(i)
        if wide:
            narrow = tape.new(count * self.value)
            tape.drop(gradient)
            gradient = narrow
        return gradient

    def _activation_back(self, i: int, row: LayerRow, g: int, kept: tuple[int, ...]) -> int:
        if not self.on_view:
            return self._plain_back(i, row, g, kept)
        # Overwriting a view (instance norm's output): autograd copies the gradient of the base,
        # then that of the view, and works on the copies (`CopySlices`).
        tape = self.tape
        nbytes = _count(row.in_shape) * self.value
        base, part = tape.new(nbytes), tape.new(nbytes)
        gradient = tape.new(nbytes)
        tape.drop(part)
        for number in kept:
            tape.drop(number)
        tape.drop(gradient)
        tape.drop(g)
        return base

    def _skip_back(self, i: int, row: LayerRow, g: int, kept: tuple[int, ...]) -> int:
        """The skip's gradient, from the concatenation, meets the pooling's."""
        other, dense = self.skip_gradients.pop(row.name)
        if g < 0:
            return other
        tape = self.tape
        nbytes = _count(row.out_shape) * self.value
        if dense:
            return self._sum(other, g, nbytes)
        gradient = tape.new(nbytes)
        tape.drop(g)
        tape.drop(other)
        return gradient

    def _pool_back(self, i: int, row: LayerRow, g: int, kept: tuple[int, ...]) -> int:
        return self._plain_back(i, row, g, kept)

    def _up_back(self, i: int, row: LayerRow, g: int, kept: tuple[int, ...]) -> int:
        tape, value = self.tape, self.value
        batch, channels, height, width = row.in_shape
        if self.tile is not None:
            g = self.crop_back(
                g, (2 * height, 2 * width), row.out_shape[2:], batch * row.out_shape[1]
            )
        gradient = tape.new(batch * channels * height * width * value)
        if self.spec.up == "transpose":
            self._weights_back(i, row, g, kept)
        else:
            tape.drop(g)
        if self.tile is not None:
            below = self.rows[i - 1].out_shape if i else row.in_shape
            gradient = self.crop_back(gradient, below[2:], (height, width), batch * channels)
        return gradient

    def _concat_back(self, i: int, row: LayerRow, g: int, kept: tuple[int, ...]) -> int:
        assert row.source is not None
        tape = self.tape
        tape.refs[g] += 1
        skip, dense = g, row.out_shape[0] == 1
        batch, width, height, columns = row.out_shape
        if self.tile is not None:
            before = self.skip_shapes[row.source]
            if before[2:] != (height, columns):
                skip = self.crop_back(g, before[2:], (height, columns), batch * before[1])
                dense = True
        self.skip_gradients[row.source] = (skip, dense)
        return g


def _count(shape: tuple[int, int, int, int]) -> int:
    batch, channels, height, width = shape
    return batch * channels * height * width


def _padded(shape: tuple[int, int, int, int], kernel: int) -> int:
    batch, channels, height, width = shape
    return batch * channels * (height + kernel - 1) * (width + kernel - 1)


def _upsampled(row: LayerRow) -> int:
    """Elements of the up-sampled map before it is cropped."""
    batch, _, height, width = row.in_shape
    return batch * row.out_shape[1] * 4 * height * width
