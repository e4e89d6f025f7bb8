"""Loss and backward pass, replayed tensor by tensor.

Gradients flow as autograd's engine passes them: a layer's gradients of output and input live
together; what a layer kept goes once it has run; a parameter's first gradient is kept, later ones
are added to it. The gradient of a skip is a view that keeps the whole gradient of its
concatenation alive until the encoder's pooling adds to it.
"""

from __future__ import annotations

from typing import Any

from bigunet.layers import LayerRow
from bigunet.memory.causes import ACTIVATIONS, GRADIENTS, parameter_counts
from bigunet.memory.forward import Forward, elements, padded_elements
from bigunet.memory.tape import BACKWARD, LOSS

__all__ = ["Replay"]


class Replay(Forward):
    """Replays layers in both directions."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
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

    def crop_back(
        self, gradient: int, before: tuple[int, int], after: tuple[int, int], n: int
    ) -> int:
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
            ops.extend((len(events), i, BACKWARD, micro_batch))
            gradient = backwards[row.kind](i, row, gradient, saved.pop(i))
        return gradient

    def _plain_back(self, i: int, row: LayerRow, g: int, kept: tuple[int, ...]) -> int:
        tape = self.tape
        gradient = tape.new(elements(row.in_shape) * self.value)
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
        if self.workspace:
            self._work(row, weights=True)
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
            gradient = tape.new(elements(row.in_shape) * value)
            self._weights_back(i, row, g, kept)
            return gradient
        count, inner = padded_elements(row.in_shape, self.spec.kernel), elements(row.in_shape)
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
        count = elements(row.in_shape)
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
        nbytes = elements(row.in_shape) * self.value
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
        nbytes = elements(row.out_shape) * self.value
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
        batch, _, height, columns = row.out_shape
        if self.tile is not None:
            before = self.skip_shapes[row.source]
            if before[2:] != (height, columns):
                skip = self.crop_back(g, before[2:], (height, columns), batch * before[1])
                dense = True
        self.skip_gradients[row.source] = (skip, dense)
        return g
