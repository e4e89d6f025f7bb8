"""Progress of long work: a bar in a shell or notebook, or lines of JSON for a launcher to read."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm.auto import tqdm

__all__ = ["PROGRESS_FILE", "Progress"]

#: Environment variable naming the file that `launch` watches.
PROGRESS_FILE = "BIGUNET_PROGRESS_FILE"


class Progress:
    """Counts `done` of `total`. Silent unless `shown`; a context manager.

    Under `bigunet.launch` it appends {"done", "total", "text", ...values} to a file, at most ten
    times a second, and the launcher draws the bar.
    """

    def __init__(self, total: int, text: str, *, done: int = 0, shown: bool = True) -> None:
        self.total, self.text, self.done = total, text, done
        name = os.environ.get(PROGRESS_FILE)
        self._file = Path(name) if shown and name else None
        self._bar = None
        if shown and self._file is None:
            self._bar = tqdm(total=total, initial=done, desc=text, leave=True)
        self._written = 0.0
        self._write({})

    def update(self, count: int = 1, **values: float) -> None:
        """`count` more are done; `values` are shown beside the bar."""
        self.done += count
        if self._bar is not None:
            self._bar.set_postfix({k: f"{v:.4g}" for k, v in values.items()}, refresh=False)
            self._bar.update(count)
        if self.done >= self.total or time.monotonic() - self._written > 0.1:
            self._write(values)

    def _write(self, values: dict[str, Any]) -> None:
        if self._file is not None:
            line = {"done": self.done, "total": self.total, "text": self.text, **values}
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")
            self._written = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
