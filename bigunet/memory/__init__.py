"""Memory of one training step: predicted from the layer table, cause by cause and in order."""

from __future__ import annotations

from bigunet.memory.causes import CAUSES
from bigunet.memory.predict import memory, peak_bytes
from bigunet.memory.segments import Segment, check_stages, cut, segments

__all__ = ["CAUSES", "Segment", "check_stages", "cut", "memory", "peak_bytes", "segments"]
