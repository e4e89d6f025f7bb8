"""What surrounds the code: environments in step, tested versions, citation, notebooks, wheel."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import bigunet
from bigunet import handover

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OPTIONAL = PROJECT["optional-dependencies"]
COURSE = handover.COURSE
NOTEBOOKS = sorted(
    {*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "notebooks" / f"{n}.ipynb" for n in COURSE)}
)

# The environments hold what the notebooks need; `make test` adds the developers' tools by pip.
NOT_IN_ENVIRONMENTS = {"docs", "test", "all"}
CONDA_NAMES = {"pytorch": "torch"}


def tracked() -> list[Path]:
    """Files of the checkout that git knows, or would on the next commit."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / name for name in done.stdout.split("\0") if name]
    return [p for p in paths if p.is_file()]


def requirements(*extras: str) -> dict[str, SpecifierSet]:
    """Declared requirements by canonical name, without the project's own extras."""
    texts = [*PROJECT["dependencies"], *(t for e in extras for t in OPTIONAL[e])]
    parsed = [Requirement(t) for t in texts]
    return {canonicalize_name(r.name): r.specifier for r in parsed if r.name != "bigunet"}


# Dependencies -----------------------------------------------------------------------------------


def environment(path: Path) -> tuple[dict[str, SpecifierSet], list[str]]:
    """Packages of a conda environment file by their name in pip, and pip's own lines."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert content["name"] == "bigunet"
    assert content["channels"] == ["conda-forge"]
    packages: dict[str, SpecifierSet] = {}
    lines: list[str] = []
    for entry in content["dependencies"]:
        if isinstance(entry, dict):
            lines += entry["pip"]
            continue
        name, operator, version = re.fullmatch(r"([\w.-]+)(=(?![=]))?(.*)", entry).groups()  # type: ignore[union-attr]
        specifier = f"=={version}.*" if operator else version
        packages[canonicalize_name(CONDA_NAMES.get(name, name))] = SpecifierSet(specifier)
    for line in lines:
        if not line.startswith("-"):
            requirement = Requirement(line)
            packages[canonicalize_name(requirement.name)] = requirement.specifier
    return packages, [line for line in lines if line.startswith("-")]


def test_environments_are_in_step_with_pyproject() -> None:
    wanted = requirements(*(e for e in OPTIONAL if e not in NOT_IN_ENVIRONMENTS))
    root, root_lines = environment(ROOT / "environment.yml")
    binder, binder_lines = environment(ROOT / "binder" / "environment.yml")
    assert root == binder
    assert root_lines == ["--editable ."]
    assert binder_lines == []  # there, postBuild installs the project
    python = root.pop("python")
    assert next(iter(python)).version.removesuffix(".*") in PROJECT["requires-python"]
    root.pop("pip")
    assert root == wanted


def test_binder_installs_the_project() -> None:
    script = ROOT / "binder" / "postBuild"
    assert os.access(script, os.X_OK)
    assert re.search(r"pip install .*--editable \.$", script.read_text(encoding="utf-8"), re.M)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_what_binder_runs_after_the_environment_works(tmp_path: Path) -> None:
    """postBuild in a fresh environment on a copy of the project; the dependencies lie beside."""
    copy = tmp_path / "repository"
    for path in tracked():
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    home = tmp_path / "environment"
    venv.create(home, with_pip=True)
    beside = [p for p in sys.path if p.endswith("site-packages")]
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "beside.pth").write_text("\n".join(beside))
    environment = {
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path),
        # The build back end is there already: nothing is fetched.
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    script = copy / "binder" / "postBuild"
    done = subprocess.run([script], cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    asked = "import bigunet, bigunet.lab as l; print(bigunet.__file__, l.find_notebook())"
    for command, expected in (
        ([home / "bin" / "bigunet", "--version"], [PROJECT["version"]]),
        (
            [home / "bin" / "python", "-c", asked],
            [str(copy / "bigunet" / "__init__.py"), str(copy / "notebooks" / "00_start.ipynb")],
        ),
    ):
        shown = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        assert shown.stdout.split() == expected


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)  # no local versions
    return {canonicalize_name(n): v for n, v in (line.split("==") for line in lines)}


def test_constraints_pin_every_declared_dependency_in_its_range() -> None:
    pinned = constraints()
    for name, specifier in requirements(*OPTIONAL).items():
        assert name in pinned, name
        assert specifier.contains(pinned[name]), f"{name} {pinned[name]} not in {specifier}"
    assert pinned["torch"] == "2.13.0"


def test_constraints_pin_what_the_dependencies_bring_and_nothing_else() -> None:
    brought: set[tuple[str, str]] = set()
    parsed = [Requirement(t) for t in [*PROJECT["dependencies"], *sum(OPTIONAL.values(), [])]]
    pending = [r for r in parsed if r.name != "bigunet"]
    while pending:
        requirement = pending.pop()
        for extra in ["", *requirement.extras]:
            key = (canonicalize_name(requirement.name), extra)
            if key not in brought:
                brought.add(key)
                for text in importlib.metadata.requires(requirement.name) or []:
                    inner = Requirement(text)
                    if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                        pending.append(inner)
    # A CUDA build of torch brings libraries that torch itself pins exactly.
    names = {n for n, _ in brought if not n.startswith(("nvidia-", "cuda-", "triton"))}
    assert names == set(constraints())


def test_extras_named_in_the_makefile_exist() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {e for group in re.findall(r'"\.\[([\w,]+)\]"', text) for e in group.split(",")}
    assert named
    assert named <= set(OPTIONAL)
    everything = Requirement(OPTIONAL["all"][0])
    assert everything.extras == set(OPTIONAL) - {"all"}


# Texts ------------------------------------------------------------------------------------------


def test_versions_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d\S*)", changes, re.M)
    assert newest is not None
    assert {bigunet.__version__, citation["version"], newest[1]} == {PROJECT["version"]}


def test_citation_names_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == PROJECT["license"]
    assert {"message", "title", "authors"} <= set(citation)
    paper = citation["preferred-citation"]
    assert paper["doi"] == "10.1145/3404397.3404468"
    assert paper["title"] == "Toward Large-Scale Image Segmentation on Summit"
    assert paper["year"] == 2020
    names = [author["family-names"] for author in paper["authors"]]
    assert names == ["Seal", "Lim", "Wang", "Hinkle", "Lunga", "Tsaris"]


def test_licence_is_the_three_clause_one() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["license"] == "BSD-3-Clause"
    assert text.startswith("BSD 3-Clause License")
    assert re.findall(r"^(\d)\. ", text, re.M) == ["1", "2", "3"]
    assert text.rstrip().endswith("POSSIBILITY OF SUCH DAMAGE.")


# Built from parts, so that this file does not hold what it forbids.
FORBIDDEN = [
    "/" + "work/",
    "/" + "root/",
    "/" + "tmp/",
    "/" + "home/",
    "../" + "shared",
    "pypi" + ".org",
    "python" + "hosted.org",
    "npm" + "js.org",
    "npm" + "js.com",
    "deb." + "debian.org",
]


def test_no_text_names_this_or_that_machine() -> None:
    seen = 0
    for path in tracked():
        content = path.read_bytes()
        if b"\0" in content:
            continue
        seen += 1
        text = content.decode("utf-8")
        found = [word for word in FORBIDDEN if word in text]
        assert not found, f"{path.relative_to(ROOT)} holds {found}"
    assert seen > 20


MARKDOWN = sorted(p for p in tracked() if p.suffix == ".md")


def prose(path: Path) -> str:
    """A Markdown file without its code blocks."""
    text = path.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """What a heading is linked by, as GitHub makes it."""
    found = set()
    for heading in re.findall(r"^#+ +(.*)$", prose(path), re.M):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading).lower())
        found.add(words.replace(" ", "-"))
    return found


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        place = (path.parent / target).resolve() if target else path
        assert place.exists(), link
        assert place.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(place), link


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "DEVELOPERS.md"])
def test_documents_name_goals_that_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    goals = set(re.findall(r"^\.PHONY: (.*)$", makefile, re.M)[0].split())
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.M))
    assert named <= goals


# The wheel --------------------------------------------------------------------------------------


def test_wheel_holds_code_data_and_command(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"bigunet-{PROJECT['version']}.dist-info"
        entries = archive.read(f"{info}/entry_points.txt").decode()
    assert "bigunet = bigunet.cli:main" in entries
    assert f"{info}/licenses/LICENSE" in names
    package = {n for n in names if n.startswith("bigunet/")}
    ours = {p.relative_to(ROOT) for p in tracked()}
    code = {str(p) for p in ours if p.parts[0] == "bigunet"}
    course = {f"bigunet/{p}" for p in ours if p.parts[0] == "notebooks"}
    assert course >= {f"bigunet/notebooks/{name}.ipynb" for name in COURSE}
    assert package == code | course
    assert Path(wheel).stat().st_size < 12e6


# Notebooks: the contract of CONTRIBUTING.md -----------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_keeps_the_contract(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = notebook.cells
    code = [c for c in cells if c.cell_type == "code"]
    text = [c.source for c in cells if c.cell_type == "markdown"]
    assert 1 <= len(cells) <= 25
    for cell in code:
        assert cell.outputs == []
        assert cell.execution_count is None
        assert len(cell.source.splitlines()) <= 15
        plain = re.sub(r"^\s*[%!].*$", "pass", cell.source, flags=re.M)
        kinds = {type(node) for node in ast.walk(ast.parse(plain))}
        assert not kinds & {ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef}
    tags = [tag for c in code for tag in c.metadata.get("tags", [])]
    assert tags.count("parameters") == 1
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.startswith("# ")
    assert re.search(r"\bgoals?\b|you will", cells[0].source, re.I), "goals come first"
    headings = re.findall(r"^#+ (.*)$", "\n".join(text), re.M)
    assert "real machine" in headings[-1].lower(), "'On a real machine' comes last"
    assert 2 <= sum(t.count("<details>") for t in text) <= 3, "two or three folded answers"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_stored_for_any_kernel(path: Path) -> None:
    """No output, widget state or machine's kernel name travels with the file."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    assert raw["metadata"].get("kernelspec", {}).get("name", "python3") == "python3"
    assert "widgets" not in raw["metadata"]
