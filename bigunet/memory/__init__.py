"""Memory of one training step: predicted from the layer table, cause by cause and in order."""

from __future__ import annotations

from bigunet.memory.causes import CAUSES
from bigunet.memory.predict import memory, peak_bytes
from bigunet.memory.published import Published, published_memory, published_rows
from bigunet.memory.segments import Segment, check_stages, cut, segments
from bigunet.memory.solve import (
    Fit,
    budget_bytes,
    deepest,
    largest_batch,
    largest_tile,
    static_bytes,
)
from bigunet.memory.tables import diagnosis_table, fit_table, memory_table
from bigunet.memory.why_not import Cause, Diagnosis, Remedy, step_flops, why_not

__all__ = [
    "CAUSES",
    "Cause",
    "Diagnosis",
    "Fit",
    "Published",
    "Remedy",
    "Segment",
    "budget_bytes",
    "check_stages",
    "cut",
    "deepest",
    "diagnosis_table",
    "fit_table",
    "largest_batch",
    "largest_tile",
    "memory",
    "memory_table",
    "peak_bytes",
    "published_memory",
    "published_rows",
    "segments",
    "static_bytes",
    "step_flops",
    "why_not",
]
