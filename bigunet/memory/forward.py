"""The forward pass, replayed tensor by tensor: what each layer makes, keeps and frees, and when.

The rules are those of PyTorch's autograd for the operations that `bigunet.model` calls
(`derivatives.yaml`): a convolution keeps its input, a normalisation its input and statistics, an
activation its input or its result, a pooling its input and its int64 indices, dropout its mask of
a number a channel; interpolation and concatenation keep nothing. Autocast's casts are those on a
CPU; CUDA's also runs group norm in fp32, which is not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence

from bigunet.layers import LayerRow, Shape
from bigunet.memory.causes import ACTIVATIONS, CASTS, SKIPS, TEMPORARIES, Format, parameter_counts
from bigunet.memory.tape import Tape
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import Tile

__all__ = ["CHANNEL_BLOCK", "WINOGRAD_RATIO", "Forward", "elements", "padded_elements"]

WINOGRAD_RATIO = 4
"""Winograd's F(4x4, 3x3) turns the 9 numbers of a 3 x 3 filter into 36 (Lavin and Gray,
arXiv 1509.09308); its non-fused form holds all transformed filters in work space. On a CPU, oneDNN
works on maps in blocks of channels and copies what it reads and writes into that layout (its
guide's "memory format propagation"): the input and output maps in the forward pass, the input and
the output's gradient, or both gradients, in the backward pass."""

CHANNEL_BLOCK = 16
"""oneDNN's blocks of channels on CPUs with AVX-512, nChw16c (its guide's "blocked layout"): fp32
maps are filled up to whole blocks. For the gradient of a bf16 convolution's weights it turns one
block of an image's input, and one of the output's gradient, so that pixels lie in pairs
(`tr_src_buf_size`, `tr_diff_dst_buf_size` in src/cpu/x64/jit_brgemm_conv_utils.cpp). Each thread
has its own, one thread's are counted; maps of fewer channels than a block are taken not to be
turned, where measured steps lie up to a tenth off."""


class Forward:
    """Replays layers forward on a tape. Layer numbers are positions in `rows`.

    `fake` follows fake tensors where they differ from real ones: a gradient is then never added
    in place, and group norm's backward works in the weight's precision. `workspace` counts
    what convolutions need while they run: transformed filters (CUDA), copies of maps (CPU).
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
        self.workspace = workspace
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
            ops.extend((len(events), i, phase, micro_batch))
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
                source = tape.new(elements(row.in_shape) * self.value)
                passing = (source,)
            kept = (*kept, tape.keep(source), weight)
        else:
            kept = (*kept, tape.keep(source))
        out = tape.new(elements(row.out_shape) * self.out_value)
        if self.workspace:
            self._work(row)
        # The caller holds the padded map, and autocast its copy, until the result is there.
        for number in passing:
            tape.drop(number)
        tape.drop(x)
        return out, kept

    def _work(self, row: LayerRow, *, weights: bool = False) -> None:
        """What a convolution's kernel needs while it runs, and then gives back.

        `weights`: the kernel is the one that makes the weights' gradient.
        """
        if self.form.cuda:
            if row.kind != "conv" or self.spec.kernel != 3:
                return
            count = WINOGRAD_RATIO * 9 * row.in_shape[1] * row.out_shape[1]
        else:
            count = 0
            for batch, channels, height, width in (row.in_shape, row.out_shape):
                # A first convolution reads its few bands as they lie.
                if row.kind == "conv" and self.value == 4 and channels > 4:
                    channels = -(-channels // CHANNEL_BLOCK) * CHANNEL_BLOCK
                count += batch * channels * height * width
                if weights and row.kind == "conv" and self.value == 2 and channels >= CHANNEL_BLOCK:
                    count += CHANNEL_BLOCK * height * width
        self.tape.drop(self.tape.new(count * self.value))

    def _pad(
        self, row: LayerRow, x: int, first: bool
    ) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """The padded map as the convolution takes it, what goes after it, what the padding keeps.

        Padding keeps its input unless that is the image, whose gradient nobody needs.
        """
        tape, value = self.tape, self.value
        count = padded_elements(row.in_shape, self.spec.kernel)
        kept: tuple[int, ...] = ()
        if self.wide_padding and not first:
            wide = tape.new(elements(row.in_shape) * 4)
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
        out = tape.new(elements(row.out_shape) * self.out_value)
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
            statistics = self.form.weight if spec.affine else self.value
        else:
            count = 0 if self.train.freeze_norm else width
        out = tape.new(elements(row.out_shape) * self.value)
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
            out = tape.new(elements(row.out_shape) * self.value)
            kept = tape.keep(out)
        else:
            kept = tape.keep(x)
            out = tape.new(elements(row.out_shape) * self.out_value)
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
        count = elements(row.out_shape)
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
        if kept and self.workspace:
            self._work(row)
        tape.drop(x)
        return out, kept

    def _concat(self, i: int, row: LayerRow, x: int) -> tuple[int, tuple[int, ...]]:
        tape = self.tape
        assert row.source is not None
        out = tape.new(elements(row.out_shape) * self.value)
        tape.drop(self.skips.pop(row.source))
        tape.drop(x)
        return out, ()


def elements(shape: Shape) -> int:
    """Numbers in a tensor of this shape."""
    batch, channels, height, width = shape
    return batch * channels * height * width


def padded_elements(shape: Shape, kernel: int) -> int:
    """The same with the border that a convolution of this kernel adds."""
    batch, channels, height, width = shape
    return batch * channels * (height + kernel - 1) * (width + kernel - 1)


def _upsampled(row: LayerRow) -> int:
    """Elements of the up-sampled map before it is cropped."""
    batch, _, height, width = row.in_shape
    return batch * row.out_shape[1] * 4 * height * width
