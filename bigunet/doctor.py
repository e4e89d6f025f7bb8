"""What of this environment works, what is slow, what is missing, and the remedy for each.

Nothing here is changed; `bigunet.labextensions.link` is the one cure that doctor can give.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

__all__ = ["Check", "examine", "worst"]

Level = Literal["ok", "warning", "fault"]
_LEVELS: tuple[Level, ...] = ("ok", "warning", "fault")

# What the extras bring, in words.
_EXTRAS = {
    "": "planning and plots",
    "scenes": "reading imagery",
    "train": "the network, training, mosaics",
    "pipe": "the second pipeline engine",
    "lab": "notebooks and explorers",
}
# Flags of /proc/cpuinfo: tiles or dot products of bf16, on x86 and on Arm.
_BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")


@dataclass(frozen=True)
class Check:
    """One thing looked at: what was found, and what to do where that is not all right."""

    name: str
    level: Level
    found: str
    remedy: str = ""


def worst(checks: Iterable[Check]) -> Level:
    """The gravest level among them; "ok" for none."""
    return _LEVELS[max((_LEVELS.index(check.level) for check in checks), default=0)]


def examine() -> list[Check]:
    """Look at everything: about 5 s, most of which is importing torch and fairscale."""
    parts: Sequence[Callable[[], list[Check]]] = (
        _python, _packages, _torch, _fairscale, _kernels, _extensions, _browser
    )  # fmt: skip
    return [check for part in parts for check in part()]


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _pip(what: str) -> str:
    return f"{sys.executable} -m pip install {what}"


# Versions ---------------------------------------------------------------------------------------


def _python() -> list[Check]:
    try:
        wanted = importlib.metadata.metadata("bigunet")["Requires-Python"]
    except importlib.metadata.PackageNotFoundError:
        remedy = "Install it where its pyproject.toml lies: " + _pip("--editable .")
        return [Check("bigunet", "fault", "not installed in this environment", remedy)]
    running = platform.python_version()
    found = f"{running} at {sys.executable}"
    if SpecifierSet(wanted).contains(running, prereleases=True):
        return [Check("python", "ok", found)]
    return [Check("python", "fault", f"{found}, not {wanted}", f"Use Python {wanted}.")]


def _packages() -> list[Check]:
    """One line an extra: a plain installation leaves extras out, which is no fault."""
    try:
        texts = importlib.metadata.requires("bigunet") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    declared = [Requirement(text) for text in texts]
    return [_extra(extra, purpose, declared) for extra, purpose in _EXTRAS.items()]


def _extra(extra: str, purpose: str, declared: Sequence[Requirement]) -> Check:
    own = [
        r
        for r in declared
        if r.name != "bigunet"
        and (r.marker is None if not extra else r.marker and r.marker.evaluate({"extra": extra}))
    ]
    missing, wrong = [], []
    for requirement in own:
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(requirement.name)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version}, not {requirement.specifier}")
    name = f"packages [{extra}]" if extra else "packages"
    found = "; ".join([*wrong, *([f"missing: {', '.join(missing)}"] if missing else [])])
    if not found:
        return Check(name, "ok", f"{len(own)} in their ranges ({purpose})")
    level: Level = "fault" if wrong or not extra else "warning"
    remedy = f"For {purpose}: " + _pip(f'"bigunet[{extra}]"' if extra else "bigunet")
    return Check(name, level, found, remedy)


# torch ------------------------------------------------------------------------------------------


def _torch() -> list[Check]:
    if not _has("torch"):
        remedy = "Planning works without; for the rest: " + _pip('"bigunet[train]"')
        return [Check("torch", "warning", "not installed", remedy)]
    try:
        import torch
    except Exception as error:
        return [Check("torch", "fault", f"cannot be imported: {error}", _pip('"bigunet[train]"'))]
    return [Check("torch", "ok", torch.__version__), _gpu(torch), _bf16(torch)]


def _gpu(torch: Any) -> Check:
    if torch.cuda.is_available():
        names = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            names.append(f"{properties.name} ({properties.total_memory / 2**30:.1f} GiB)")
        return Check("GPU", "ok", ", ".join(names))
    if shutil.which("nvidia-smi") or shutil.which("rocm-smi"):
        found = f"a driver's tool is here, but torch {torch.__version__} sees no GPU"
        return Check("GPU", "warning", found, "Install a build of torch for this driver.")
    return Check("GPU", "ok", "none: everything runs on the CPU")


def _bf16(torch: Any) -> Check:
    """Whether the arithmetic is in hardware, and what one product of matrices says about it."""
    if torch.cuda.is_available():
        major = torch.cuda.get_device_capability(0)[0]
        fast, where = major >= 8 or bool(torch.version.hip), f"compute capability {major}.x"
    else:
        flags = _cpu_flags()
        known = [flag for flag in _BF16_FLAGS if flag in flags]
        fast, where = bool(known), ", ".join(known) or "none of " + ", ".join(_BF16_FLAGS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    times = [_product_seconds(torch, device, kind) for kind in (torch.float32, torch.bfloat16)]
    found = f"{where}; a product of matrices runs at {times[0] / times[1]:.1f}x the speed of fp32"
    if fast:
        return Check("bf16", "ok", found)
    return Check("bf16", "warning", found, "It is right but not fast here: use precision fp32.")


def _product_seconds(torch: Any, device: str, kind: Any, side: int = 768) -> float:
    matrix = torch.ones(side, side, dtype=kind, device=device)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        # Reading one number waits for the GPU as well.
        (matrix @ matrix)[0, 0].item()
        best = min(best, time.perf_counter() - began)
    return best


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(line[1].split()) if line else set()


def _fairscale() -> list[Check]:
    if not _has("fairscale") or not _has("torch"):
        remedy = "Pipelines run without it, by torch's own engine; for both: "
        return [Check("fairscale", "warning", "not installed", remedy + _pip('"bigunet[pipe]"'))]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fairscale.nn import Pipe
    except Exception as error:
        remedy = "Use the engine `distributed`, or install again: " + _pip('"bigunet[pipe]"')
        return [Check("fairscale", "fault", f"cannot be imported: {error}", remedy)]
    found = f"{importlib.metadata.version('fairscale')}, {Pipe.__name__} can be imported"
    return [Check("fairscale", "ok", found)]


# Jupyter ----------------------------------------------------------------------------------------

_NO_LAB = "Notebooks and explorers need more packages: "


def _kernels() -> list[Check]:
    """Whether a Jupyter server can start a kernel of this very environment."""
    name = "kernel"
    if not (_has("jupyter_core") and _has("ipykernel")):
        found = "ipykernel or jupyter_core is not installed"
        return [Check(name, "warning", found, _NO_LAB + _pip('"bigunet[lab]"'))]
    from jupyter_core.paths import jupyter_path

    own, dead = [], []
    for folder in map(Path, jupyter_path("kernels")):
        for path in sorted(folder.glob("*/kernel.json")):
            try:
                program = str(json.loads(path.read_text(encoding="utf-8"))["argv"][0])
            except (OSError, ValueError, LookupError, TypeError):
                dead.append(f"{path} cannot be read")
                continue
            if _starts_here(program, path):
                own.append(path.parent.name)
            elif Path(program).is_absolute() and not Path(program).exists():
                dead.append(f"{path.parent.name} starts {program}, which is gone")
    register = f"{sys.executable} -m ipykernel install --user --name bigunet"
    checks = []
    if own:
        checks.append(Check(name, "ok", "registered as " + ", ".join(dict.fromkeys(own))))
    else:
        found = "no kernel of this environment is registered"
        checks.append(Check(name, "warning", found, register))
    if dead:
        checks.append(Check("other kernels", "warning", "; ".join(dead), "Remove that folder."))
    return checks


def _starts_here(program: str, spec: Path) -> bool:
    """A bare `python` is the server's own, which is this one where the spec lies in it."""
    if not Path(program).is_absolute():
        return program.startswith("python") and Path(sys.prefix) in spec.parents
    # Not resolved: the Pythons of virtual environments are links to one and the same file.
    return Path(program).parent == Path(sys.executable).parent


def _extensions() -> list[Check]:
    if not _has("jupyter_core"):
        found = "jupyter_core is not installed"
        return [Check("labextensions", "warning", found, _NO_LAB + _pip('"bigunet[lab]"'))]
    from bigunet import labextensions as lab

    checks = [_comms(), *_other_version(lab)]
    cure = f"{sys.executable} -m bigunet doctor --link-labextensions, then restart the server"
    servers = lab.servers()
    for server in servers:
        at = f"running at {server.name}" if server.running else f"started by {server.name}"
        name = f"server {at}"
        if server.sees is None:
            checks.append(Check(name, "warning", "cannot be asked what it hands out", cure))
            continue
        lacking = [f"{n} ({what})" for n, what in lab.NEEDED.items() if n not in server.sees]
        if lacking:
            checks.append(Check(name, "fault", f"lacks {', '.join(lacking)}", cure))
        else:
            checks.append(Check(name, "ok", f"hands out {' and '.join(lab.NEEDED)}"))
    if not servers:
        linked = all(lab.visible(n) for n in lab.NEEDED)
        found = "none is running and none can be started here"
        checks.append(
            Check("server", "ok", f"{found}; the user's folder has both extensions")
            if linked
            else Check("server", "warning", found, f"On a hub: {cure}")
        )
    return checks


def _comms() -> Check:
    """The kernel's side: without these nothing of an explorer reaches any page."""
    needed = ("comm", "ipywidgets", "jupyter_bokeh")
    missing = [package for package in needed if not _has(package)]
    if missing:
        found = f"the kernel lacks {', '.join(missing)}"
        return Check("comms", "fault", found, _pip('"bigunet[lab]"'))
    found = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in needed)
    return Check("comms", "ok", found)


def _other_version(lab: Any) -> list[Check]:
    """A plot extension in the page of another release than the kernel's may not understand it."""
    seen = lab.visible(lab.PLOTS)
    if seen is None or not _has("jupyter_bokeh"):
        return []
    page, kernel = lab.version(seen), importlib.metadata.version("jupyter_bokeh")
    if page.split(".")[0] == kernel.split(".")[0]:
        return []
    found = f"{seen} is of release {page}, the kernel's of {kernel}"
    return [Check("plot extension", "warning", found, "Install the same release on both sides.")]


def _browser() -> list[Check]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    found = path or "none: only this project's own browser tests need it"
    return [Check("chromium", "ok", found)]
