"""The training loop: tiles drawn from an image, or the whole image in every step.

A run lives in a folder: `run.json` (what is trained on what), `history.jsonl` (a line a step),
`checkpoints/` and, at the end, `weights.safetensors`. Started again with the same arguments it
goes on where it was stopped; on CPU, with the same number of ranks, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from bigunet import ranks as ranks_of
from bigunet.checkpoint import Weights
from bigunet.progress import Progress
from bigunet.run_folder import stop_signals
from bigunet.scenes import Normalise, ScenePair
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.trainer import Fitted, Trainer

__all__ = ["Fitted", "fit"]


def fit(
    spec: UNetSpec,
    pair: ScenePair,
    train: TrainSpec,
    *,
    out: str | Path,
    val: ScenePair | None = None,
    mode: Literal["tiles", "whole"] = "tiles",
    exact: bool | None = None,
    normalise: Normalise | None = None,
    start: Weights | None = None,
    resume: bool = True,
    stop_after: int | None = None,
    save_every: int = 100,
    validate_every: int | None = None,
    leave_out: Sequence[int | str] = (),
    card: dict[str, Any] | None = None,
    cache_bytes: int = 2**28,
    weights_dtype: Literal["fp32", "bf16"] = "fp32",
    progress: bool = True,
) -> Fitted:
    """Train a network of `spec` on an image and its labels; on all ranks that `torchrun` started.

    Parameters
    ----------
    out : folder of the run. What is in it decides where to go on.
    val : image and labels to score, every `validate_every` steps and at the end.
    mode : "tiles": each step draws `train.batch` tiles; "whole": each step is the whole image,
        in tiles of `train.tile`.
    exact : True refuses whatever makes a tile differ from the whole image; False admits it;
        None: True for mode "whole", else False.
    normalise : by default mean and deviation of the image's bands.
    start : weights to start from instead of random ones.
    resume : False refuses a folder with checkpoints.
    stop_after : do at most so many steps now, and go on next time (a batch system's time limit).
    save_every : steps between checkpoints.
    leave_out : classes that `mean_iou_kept` leaves out, such as "water".
    card : added to the weights' model card.
    cache_bytes : an image, or labels, of at most this size are held in memory on every rank.
    weights_dtype : "bf16" rounds the final weights for a file of half the size; they are
        calibrated and scored as rounded.

    A first Ctrl-C, SIGTERM or SIGUSR1 (a batch system's warning) on any rank ends the step at
    hand, writes a checkpoint and raises KeyboardInterrupt; a second Ctrl-C or SIGTERM stops at
    once.

    Raises
    ------
    SpecError, ShapeError, SceneError, ExactnessError : see `exact_step`, before anything is
    written. CheckpointError : `out` belongs to another run. OutputError : it cannot be written.
    """
    with ranks_of.init() as ranks:
        run = Trainer(spec, pair, train, Path(out), ranks, mode, exact, normalise, cache_bytes)
        run.open(start, resume)
        last = train.steps if stop_after is None else min(train.steps, run.done + stop_after)
        with (
            Progress(train.steps, "train", done=run.done, shown=progress and ranks.first) as bar,
            stop_signals() as stop,
        ):
            while run.done < last:
                row = run.advance()
                bar.update(loss=row["loss"], rate=row["rate"])
                stopped = ranks.any(stop.is_set())
                due = validate_every and run.done % validate_every == 0
                if val is not None and due and run.done < last:
                    run.validate(val, leave_out)
                if stopped or run.done % save_every == 0 or run.done == last:
                    run.save()
                if stopped and run.done < train.steps:
                    raise KeyboardInterrupt(f"stopped after step {run.done}; run again to go on")
        return run.finish(val, leave_out, card or {}, weights_dtype)
