"""A whole step of one device, replayed: micro-batches forward, loss, backward, optimiser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bigunet.geometry import padded_size
from bigunet.layers import LayerRow, Shape
from bigunet.memory.backward import Replay
from bigunet.memory.causes import (
    ACTIVATIONS,
    INPUT,
    SKIPS,
    Format,
    parameter_counts,
)
from bigunet.memory.segments import Segment
from bigunet.memory.tape import BACKWARD, FORWARD, OPTIMISE, RECOMPUTE, Tape
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import Tile

__all__ = ["StepRun", "replay_step"]


@dataclass(slots=True)
class StepRun:
    """The tape of a step, and the number of events when the first forward pass ended."""

    tape: Tape
    after_forward: int = 0


@dataclass(slots=True)
class _Open:
    """One micro-batch between its forward and its backward pass."""

    inputs: list[tuple[int, tuple[tuple[str, int], ...]]]
    recompute: bool
    saved: dict[int, tuple[int, ...]]
    logits: int = -1


def replay_step(
    spec: UNetSpec,
    train: TrainSpec,
    rows: Sequence[LayerRow],
    image: Shape,
    form: Format,
    parts: Sequence[Segment],
    start: int,
    *,
    tile: Tile | None,
    recompute: bool,
    recompute_last: bool,
    in_flight: int,
    keep_gradients: bool,
    fake: bool,
    workspace: bool = False,
) -> StepRun:
    """The step of the device that holds `parts`, whose first layer is row `start`.

    `rows` are the whole network's, of one micro-batch of shape `image`. Of `in_flight`
    micro-batches two stand for all: the last, and the first with its forward before and its
    backward after the last's; the others only take the place of what they keep.
    """
    stop = start + sum(len(part.rows) for part in parts)
    replay = Replay(spec, train, rows, form, tile, fake=fake, workspace=workspace)
    stage = _Stage(replay, parts, start, stop, image)
    tape = replay.tape
    run = StepRun(tape)
    if keep_gradients:
        replay.gradients.update(range(start, stop))
    first = None
    others = -1
    if in_flight > 1:
        first = stage.forward(0, recompute)
        run.after_forward = len(tape.events)
        if in_flight > 2:
            # What the first keeps, the others keep too.
            kept = _alive(tape)
            tape.op(start, FORWARD, 1)
            others = tape.new((in_flight - 2) * kept, ACTIVATIONS)
    last = stage.forward(in_flight - 1, recompute_last)
    if in_flight == 1:
        run.after_forward = len(tape.events)
    stage.backward(last, in_flight - 1)
    if in_flight == 1 and stage.is_last:
        run.after_forward = replay.after_loss
    if first is not None:
        stage.backward(first, 0)
        if others >= 0:
            tape.drop(others)
    _optimise(replay, start, stop)
    return run


def _alive(tape: Tape) -> int:
    return sum(size for size, refs in zip(tape.size, tape.refs, strict=True) if refs)


class _Stage:
    """Runs the parts of one device forward and backward."""

    def __init__(
        self, replay: Replay, parts: Sequence[Segment], start: int, stop: int, image: Shape
    ) -> None:
        self.replay, self.start, self.stop, self.image = replay, start, stop, image
        ends = []
        for part in parts:
            ends.append((start, start + len(part.rows)))
            start = ends[-1][1]
        self.parts = list(zip(parts, ends, strict=True))
        made = {name for part in parts for name in part.makes}
        taken = {name for part in parts for name in part.takes}
        self.takes = [name for part in parts for name in part.takes if name not in made]
        self.makes = [name for part in parts for name in part.makes if name not in taken]
        rows = replay.rows
        self.is_first, self.is_last = self.start == 0, stop == len(rows)
        batch, _, height, width = image
        self.pixels = batch * height * width
        self.logit_size = rows[-1].out_shape[2:]
        self.true_size = (height, width)
        if replay.tile is not None:
            self.true_size = replay.tile.out.shape
            self.pixels = batch * self.true_size[0] * self.true_size[1]

    def forward(self, micro_batch: int, recompute: bool) -> _Open:
        replay, tape = self.replay, self.replay.tape
        replay.micro_batch = micro_batch
        replay.saved = {}
        tape.op(self.start, FORWARD, micro_batch)
        x, held = self._receive()
        inputs = []
        for part, (start, stop) in self.parts:
            if recompute:
                tape.kept_as = ACTIVATIONS
                tape.row = start
                taken = tuple((name, tape.keep(replay.skips[name])) for name in part.takes)
                inputs.append((tape.keep(x), taken))
                x = self._own(start, x)
            x = replay.forward(start, stop, x, FORWARD, not recompute)
        if held >= 0:
            tape.drop(held)
        tape.kept_as = ACTIVATIONS
        opened = _Open(inputs, recompute, replay.saved)
        if self.is_last:
            opened.logits = x
        else:
            replay.end_autocast()
            # Sent: the result and the skips that later stages take.
            tape.drop(x)
            for name in self.makes:
                tape.drop(replay.skips.pop(name))
        return opened

    def _receive(self) -> tuple[int, int]:
        """The stage's input with one holder, and what is held until the forward pass ends."""
        replay, tape = self.replay, self.replay.tape
        rows, form = replay.rows, replay.form
        if not self.is_first:
            x = tape.new(_count(rows[self.start - 1].out_shape) * form.value, ACTIVATIONS)
            for name in self.takes:
                shape = replay.skip_shapes[name]
                replay.skips[name] = tape.new(_count(shape) * form.value, SKIPS)
            return x, -1
        image = 4 if form.autocast else form.value
        # The image belongs to the caller, who holds it throughout.
        x = tape.new(0, INPUT)
        tape.refs[x] += 1
        height, width = self.image[2:]
        stride = replay.spec.stride
        if replay.tile is None and (height % stride or width % stride):
            padded = (padded_size(height, stride), padded_size(width, stride))
            x = tape.new(self.image[0] * self.image[1] * padded[0] * padded[1] * image)
            tape.refs[x] += 1
            return x, x
        return x, -1

    def backward(self, opened: _Open, micro_batch: int) -> None:
        replay, tape = self.replay, self.replay.tape
        rows = replay.rows
        replay.micro_batch = micro_batch
        replay.saved = opened.saved
        batch = self.image[0]
        if self.is_last:
            g = replay.loss(opened.logits, self.pixels)
            g = replay.crop_back(g, self.logit_size, self.true_size, batch * replay.spec.classes)
        else:
            tape.op(self.stop - 1, BACKWARD, micro_batch)
            g = tape.new(_count(rows[self.stop - 1].out_shape) * replay.value)
            for name in self.makes:
                got = tape.new(_count(replay.skip_shapes[name]) * replay.value)
                replay.skip_gradients[name] = (got, True)
        for k in range(len(self.parts) - 1, -1, -1):
            part, (start, stop) = self.parts[k]
            if opened.recompute:
                self._recompute(part, start, stop, opened.inputs[k])
            g = replay.backward(start, stop, g)
            if opened.recompute:
                x, taken = opened.inputs[k]
                tape.drop(x)
                for _, number in taken:
                    tape.drop(number)
        if self.is_last:
            tape.drop(replay.value_of_loss)
        # Gradients of the inputs: sent, or nobody's.
        if g >= 0:
            tape.drop(g)
        if not self.is_first:
            for name in self.takes:
                tape.drop(replay.skip_gradients.pop(name)[0])

    def _own(self, start: int, x: int) -> int:
        """A copy of a segment's input where its first layer would overwrite it."""
        replay, tape = self.replay, self.replay.tape
        row = replay.rows[start]
        if row.kind != "activation" or not replay.in_place:
            return x
        copy = tape.new(_count(row.in_shape) * replay.value)
        tape.drop(x)
        return copy

    def _recompute(
        self, part: Segment, start: int, stop: int, inputs: tuple[int, tuple[tuple[str, int], ...]]
    ) -> None:
        replay, tape = self.replay, self.replay.tape
        x, taken = inputs
        tape.refs[x] += 1
        outer = replay.skips
        replay.skips = {}
        for name, number in taken:
            tape.refs[number] += 1
            replay.skips[name] = number
        end = stop
        # Recomputation ends as soon as all that was kept is there again.
        while end > start + 1 and not _keeps(replay, replay.rows[end - 1]):
            end -= 1
            replay.saved[end] = ()
        x = self._own(start, x)
        x = replay.forward(start, end - 1, x, RECOMPUTE, True)
        replay.out_value = 0
        out = replay.forward(end - 1, end, x, RECOMPUTE, True)
        replay.out_value = replay.value
        tape.drop(out)
        for number in replay.skips.values():
            tape.drop(number)
        replay.skips = outer
        replay.end_autocast()


def _keeps(replay: Replay, row: LayerRow) -> bool:
    if row.kind == "up":
        return replay.spec.up == "transpose"
    return row.kind not in ("skip", "concat")


def _optimise(replay: Replay, start: int, stop: int) -> None:
    """The update's temporaries: gradients with weight decay added, which SGD makes of weights (not
    of biases and norms), one after the other on a CPU, all at once on CUDA. Adam and AdamW are
    fused (`bigunet.optimisers`) and make none."""
    tape, train = replay.tape, replay.train
    if train.optimiser not in ("sgd", "momentum") or not train.weight_decay:
        tape.op(stop - 1, OPTIMISE, 0)
        return
    sizes = [
        (i, parameter_counts(replay.spec, row)[0] * replay.form.weight)
        for i, row in enumerate(replay.rows[start:stop], start)
        if row.parameters and row.kind != "norm"
    ]
    if replay.form.cuda:
        tape.op(stop - 1, OPTIMISE, 0)
        for number in [tape.new(nbytes) for _, nbytes in sizes]:
            tape.drop(number)
        return
    for i, nbytes in sizes:
        tape.op(i, OPTIMISE, 0)
        tape.drop(tape.new(nbytes))


def _count(shape: Shape) -> int:
    batch, channels, height, width = shape
    return batch * channels * height * width
