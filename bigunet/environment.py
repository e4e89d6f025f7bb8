"""Where something was measured: the processor, the software and the day."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
from pathlib import Path

__all__ = ["cores", "cpu_model", "environment", "version_of"]


def cores() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """The CPU's name as the operating system has it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    named = re.search(r"^(?:model name|cpu|Hardware)\s*:\s*(.+)$", text, re.M)
    return named[1].strip() if named else platform.processor() or platform.machine()


def version_of(distribution: str) -> str:
    """The installed version of a distribution, without importing it; "" if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def environment() -> dict[str, str]:
    """What a measurement should carry along: it names the machine's parts, not its owner."""
    return {
        "cpu": cpu_model(),
        "cores": str(cores()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "bigunet": version_of("bigunet"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
