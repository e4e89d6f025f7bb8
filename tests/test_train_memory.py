"""A step's memory is that of one tile, whatever the size of the image."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def measure(root: Path, size: int) -> float:
    """Peak GiB of one exact step in a process of its own, as the benchmark measures it."""
    script = root / "benchmarks" / "train_memory.py"
    options = (f"--size={size}", "--tile=128", "--levels=3", "--channels=8")
    out = subprocess.run(
        [sys.executable, str(script), *options], check=True, capture_output=True, text=True
    )
    result = json.loads(out.stdout)
    assert result["pixels"] == size * size
    return float(result["peak_gib"])


def test_sixteen_times_the_image_needs_little_more_memory(root: Path) -> None:
    small, large = measure(root, 384), measure(root, 1536)
    # The activations of the large image in one piece would take about 1 GiB; its files have 9 MiB.
    assert large - small < 0.08
    assert large < 1.0
