"""Readers: one window of one file as an array (band, y, x), whatever the format.

A reader is what stands behind a lazy scene. It opens cheaply, checks at once what can be checked,
reads windows from any thread, can be pickled, and turns every failure into a `SceneError`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SceneError, fail

__all__ = ["Array", "MemoryReader", "NpyReader", "Reader", "Selection", "layout_of"]

Array = np.ndarray[Any, np.dtype[Any]]
Transform = tuple[float, float, float, float, float, float]
#: A 3-d array without named axes: an axis of at most this many entries is taken for the bands.
MAX_PLAIN_BANDS = 16


class Reader:
    """Base: shape (bands, height, width), dtype, georeference; subclasses give `_read`."""

    def __init__(
        self,
        path: str,
        shape: tuple[int, int, int],
        dtype: Any,
        *,
        crs: str | None = None,
        transform: Transform | None = None,
        nodata: float | None = None,
    ) -> None:
        self.path, self.shape, self.dtype = path, shape, np.dtype(dtype)
        self.crs, self.transform, self.nodata = crs, transform, nodata
        self.meta: dict[str, Any] = {}
        if min(shape) < 1:
            fail(
                SceneError,
                rule="a scene must have at least one band, row and column",
                got=f"shape {shape} in {path}",
                remedy="Check how the file was written",
            )
        if self.dtype.kind not in "buif":
            fail(
                SceneError,
                rule="pixels must be integers or real floating-point numbers",
                got=f"{self.dtype} in {path}",
                remedy="Convert the file to uint8, uint16, int16 or float32",
            )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def _read(self, bands: Sequence[int], y0: int, y1: int, x0: int, x1: int) -> Array:
        raise NotImplementedError

    def read(self, bands: Sequence[int], y0: int, y1: int, x0: int, x1: int) -> Array:
        """The window, contiguous: (len(bands), y1 - y0, x1 - x0). `SceneError` if it fails."""
        try:
            return np.ascontiguousarray(self._read(bands, y0, y1, x0, x1))
        except (SceneError, MemoryError):
            raise
        except Exception as error:  # codecs raise anything: zlib.error, RuntimeError, OSError, ...
            fail(
                SceneError,
                rule="every window of a scene must be readable",
                got=f"rows {y0}:{y1}, columns {x0}:{x1}, bands {list(bands)} of {self.path}: "
                f"{type(error).__name__}: {str(error).rstrip('.')}",
                remedy="The file is damaged or incomplete: fetch or write it again",
            )

    def __getitem__(self, key: Any) -> Array:
        """NumPy indexing, for dask: slices are read exactly, other indices by bounding box."""
        keys = key if isinstance(key, tuple) else (key,)
        keys = (*keys, *(slice(None),) * (3 - len(keys)))
        spans: list[tuple[int, int]] = []
        local: list[Any] = []
        for index, size in zip(keys, self.shape, strict=True):
            if isinstance(index, slice) and index.step in (None, 1):
                lo, hi, _ = index.indices(size)
                spans.append((lo, max(lo, hi)))
                local.append(slice(None))
            else:
                chosen = np.arange(size)[index]
                lo = int(chosen.min()) if chosen.size else 0
                spans.append((lo, int(chosen.max()) + 1 if chosen.size else 0))
                local.append(chosen - lo)
        (b0, b1), (y0, y1), (x0, x1) = spans
        if min(b1 - b0, y1 - y0, x1 - x0) == 0:
            block = np.empty((b1 - b0, y1 - y0, x1 - x0), self.dtype)
        else:
            block = self.read(range(b0, b1), y0, y1, x0, x1)
        for axis in (2, 1, 0):
            block = block[(slice(None),) * axis + (local[axis],)]
        return block


class MemoryReader(Reader):
    """For formats without windows: `load()` gives the whole (band, y, x) once, on first use."""

    def __init__(self, load: Callable[[], Array], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._load = load
        self._whole: Array | None = None
        self._lock = threading.Lock()

    def _read(self, bands: Sequence[int], y0: int, y1: int, x0: int, x1: int) -> Array:
        with self._lock:
            if self._whole is None:
                self._whole = self._load()
        return self._whole[_as_slice(bands), y0:y1, x0:x1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_whole": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())


class Selection(Reader):
    """Some bands, or a rectangle, of another reader; the transform moves along."""

    def __init__(
        self,
        inner: Reader,
        bands: Sequence[int] | None = None,
        box: tuple[int, int, int, int] | None = None,
    ) -> None:
        self._inner = inner
        self._bands = tuple(range(inner.shape[0]) if bands is None else bands)
        y0, y1, x0, x1 = box or (0, inner.shape[1], 0, inner.shape[2])
        self._y0, self._x0 = y0, x0
        transform = inner.transform
        if transform is not None:
            a, b, c, d, e, f = transform
            transform = (a, b, c + a * x0 + b * y0, d, e, f + d * x0 + e * y0)
        super().__init__(
            inner.path,
            (len(self._bands), y1 - y0, x1 - x0),
            inner.dtype,
            crs=inner.crs,
            transform=transform,
            nodata=inner.nodata,
        )
        self.meta = inner.meta

    def _read(self, bands: Sequence[int], y0: int, y1: int, x0: int, x1: int) -> Array:
        dy, dx = self._y0, self._x0
        chosen = [self._bands[b] for b in bands]
        # `read`, so that an error names the file's own rows and bands.
        return self._inner.read(chosen, y0 + dy, y1 + dy, x0 + dx, x1 + dx)


class NpyReader(Reader):
    """A .npy file, mapped anew for each window so that pages read before can leave memory."""

    def __init__(self, path: Path, layout: str | None) -> None:
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            fail(
                SceneError,
                rule="a .npy file must hold the whole array that its header states",
                got=f"{path}: {error}",
                remedy="The file is damaged or incomplete: save the array again with numpy.save",
            )
        self._axes = layout_of(array.shape, layout, str(path))
        shape = tuple(array.shape[i] if i >= 0 else 1 for i in self._axes)
        super().__init__(str(path), (shape[0], shape[1], shape[2]), array.dtype)

    def _read(self, bands: Sequence[int], y0: int, y1: int, x0: int, x1: int) -> Array:
        array = np.load(self.path, mmap_mode="r", allow_pickle=False)
        view = array[None] if self._axes[0] < 0 else array.transpose(self._axes)
        return np.array(view[_as_slice(bands), y0:y1, x0:x1], order="C", copy=True)


def layout_of(shape: tuple[int, ...], layout: str | None, where: str) -> tuple[int, int, int]:
    """Which axes are (band, y, x); -1 for a band axis that is not there.

    `layout` is "HW", "HWB" or "BHW". Where None: two axes are (y, x); of three, the one axis among
    the first and the last that has at most 16 entries is the bands. Both or neither is ambiguous.
    """
    options = {"HW": (-1, 0, 1), "HWB": (2, 0, 1), "BHW": (0, 1, 2)}
    if layout is None and len(shape) == 2:
        layout = "HW"
    elif layout is None and len(shape) == 3:
        first, last = shape[0] <= MAX_PLAIN_BANDS, shape[2] <= MAX_PLAIN_BANDS
        layout = "BHW" if first and not last else "HWB" if last and not first else None
        if layout is None:
            fail(
                SceneError,
                rule="which axis holds the bands must be clear: one of the first and the last "
                f"axis has at most {MAX_PLAIN_BANDS} entries",
                got=f"shape {shape} in {where}",
                remedy="Pass layout='BHW' (bands first) or layout='HWB' (bands last)",
            )
    if layout not in options or len(layout) != len(shape):
        fail(
            SceneError,
            rule="a scene has the axes (y, x), (y, x, band) or (band, y, x)",
            got=f"shape {shape} with layout {layout!r} in {where}",
            remedy="Pass layout='HW', 'HWB' or 'BHW' as the array has it",
        )
    return options[layout]


def _as_slice(bands: Sequence[int]) -> slice | list[int]:
    """A run of bands as a slice, which reads a view instead of a copy."""
    first, num = bands[0], len(bands)
    run = list(bands) == list(range(first, first + num))
    return slice(first, first + num) if run else list(bands)
