"""What doctor says of this environment, and of ones that lack something."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bigunet import doctor as module
from bigunet.doctor import Check, examine, worst
from bigunet.labextensions import MANAGER, PLOTS
from bigunet.views.figures import fix_command


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    """Environment variables of a user without any Jupyter folders yet."""
    return {
        **os.environ,
        "HOME": str(tmp_path),
        "JUPYTER_DATA_DIR": str(tmp_path / "data"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
    }


def run(folders: dict[str, str], *options: str) -> tuple[int, Any]:
    command = [sys.executable, "-m", "bigunet", "doctor", "--json", *options]
    done = subprocess.run(command, env=folders, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def by_name(checks: list[Any]) -> dict[str, Any]:
    return {check["name"]: check for check in checks}


def test_the_tests_own_environment_is_sound(folders: dict[str, str]) -> None:
    status, said = run(folders)
    checks = by_name(said["checks"])
    assert {"python", "packages", "torch", "GPU", "bf16", "fairscale", "kernel", "comms"} <= set(
        checks
    )
    assert status == 0, said
    assert said["level"] in ("ok", "warning")
    assert checks["torch"]["found"] == importlib.metadata.version("torch")
    assert sys.executable in checks["python"]["found"]
    assert checks["fairscale"]["found"].startswith("0.4.13")
    assert all(check["remedy"] for check in said["checks"] if check["level"] != "ok")
    assert said["linked"] == {}
    assert not (Path(folders["HOME"]) / "data").exists(), "looking changes nothing"


def test_the_page_s_hint_is_a_command_that_links(folders: dict[str, str], tmp_path: Path) -> None:
    """As it stands in the page, from another folder, without this environment on the PATH."""
    elsewhere = {**folders, "PATH": "/usr/bin:/bin", "PYTHONPATH": ""}
    command = [*shlex.split(fix_command()), "--json"]
    done = subprocess.run(
        command, env=elsewhere, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    target = tmp_path / "data" / "labextensions" / PLOTS
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["linked"].keys() == {str(target)}
    assert (target / "package.json").is_file()


def test_a_server_without_the_extensions_is_a_fault_until_they_are_lent(
    folders: dict[str, str], tmp_path: Path
) -> None:
    """A JupyterLab command of an environment whose share/jupyter is empty, first on the PATH."""
    hub = tmp_path / "hub"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", hub], check=True)
    packages = next(hub.glob("lib/python*/site-packages"))
    (packages / "borrowed.pth").write_text(
        "\n".join(p for p in sys.path if p.endswith("site-packages"))
    )
    command = hub / "bin" / "jupyter-lab"
    command.write_text(f"#!{hub}/bin/python\n")
    command.chmod(0o755)
    env = {**folders, "PATH": f"{command.parent}{os.pathsep}{folders['PATH']}"}
    status, said = run(env)
    fault = by_name(said["checks"])[f"server started by {command}"]
    assert (status, said["level"], fault["level"]) == (1, "fault", "fault")
    assert MANAGER in fault["found"]
    assert PLOTS in fault["found"]
    assert "--link-labextensions" in fault["remedy"]
    status, said = run(env, "--link-labextensions")
    assert len(said["linked"]) == 2
    assert by_name(said["checks"])[f"server started by {command}"]["level"] == "ok"
    assert status == 0
    again = run(env, "--link-labextensions")[1]
    # Once both are seen, only the plots' extension is looked at again.
    assert set(again["linked"].values()) == {"is there already"}


def test_kernels_of_other_and_of_lost_environments_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    for name, program in (("mine", sys.executable), ("lost", str(tmp_path / "gone" / "python"))):
        spec = tmp_path / "kernels" / name / "kernel.json"
        spec.parent.mkdir(parents=True)
        spec.write_text(json.dumps({"argv": [program, "-m", "ipykernel_launcher"]}))
    own, others = module._kernels()
    assert own.level == "ok"
    assert "mine" in own.found
    assert others.level == "warning"
    assert "lost" in others.found
    assert "mine" not in others.found


def test_a_package_out_of_its_range_is_a_fault_and_a_missing_extra_is_none() -> None:
    from packaging.requirements import Requirement

    texts = ["numpy>=2.1", 'numpy<2; extra == "old"', 'no-such-thing>=1; extra == "new"']
    declared = [Requirement(text) for text in texts]
    assert module._extra("", "all", declared).level == "ok"
    old = module._extra("old", "all", declared)
    assert old.level == "fault"
    assert f"numpy {importlib.metadata.version('numpy')}, not <2" in old.found
    new = module._extra("new", "all", declared)
    assert new.level == "warning"
    assert "no-such-thing" in new.found
    assert "bigunet[new]" in new.remedy


def test_without_torch_and_jupyter_doctor_still_speaks() -> None:
    """As after a plain installation: the packages are hidden from a fresh interpreter."""
    code = (
        "import importlib.util as u, json; from bigunet import doctor; real = u.find_spec\n"
        "hidden = {'torch', 'fairscale', 'jupyter_core', 'ipykernel', 'ipywidgets'}\n"
        "u.find_spec = lambda name: None if name in hidden else real(name)\n"
        "print(json.dumps([[c.name, c.level, c.remedy] for c in doctor.examine()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = {name: (level, remedy) for name, level, remedy in json.loads(done.stdout)}
    for name in ("torch", "fairscale", "kernel", "labextensions"):
        level, remedy = said[name]
        assert level == "warning"
        assert "pip install" in remedy


def test_the_worst_level_counts() -> None:
    ok, warning, fault = (Check("x", level, "") for level in ("ok", "warning", "fault"))
    assert worst([]) == "ok"
    assert worst([ok, warning]) == "warning"
    assert worst([fault, ok]) == "fault"


def test_bf16_is_called_fast_only_where_the_processor_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.setattr(module, "_cpu_flags", lambda: {"avx2", "amx_bf16"})
    assert module._bf16(torch).level == "ok"
    monkeypatch.setattr(module, "_cpu_flags", lambda: {"avx2"})
    slow = module._bf16(torch)
    assert slow.level == "warning"
    assert "fp32" in slow.remedy


def test_every_check_is_made() -> None:
    names = [check.name for check in examine()]
    assert len(names) == len(set(names))
