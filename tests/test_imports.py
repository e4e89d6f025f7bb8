"""The architecture, asserted: imports point one way, and torch stays out of the planning half."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A module (or a sub-package, as one) imports only from those before it. Add new ones in place.
PLANNING = """
    errors progress environment geometry spec tiles layers machines memory cost
    plan schedule timeline rules cuts labels fold incumbent search infeasible balance planner
    stage_memory comparison simulate published_speed scaling scaling_file
    batch batch_script handover
""".split()
IMAGERY = "downscale scenes augment tile_reader sampling areas own_scene".split()
NEEDS_TORCH = """
    model recompute probe checkpoint mosaic
    ranks run_folder losses metrics sample_parallel evaluate calibrate exactness optimisers
    trainer train
    pipeline tracing measure launch here timing scaling_run scaling_check rehearsal
""".split()
SURFACE = ["views", "exercises", "labextensions", "doctor", "lab", "demo", "app", "cli", "__main__"]
ORDER = [*PLANNING, *IMAGERY, *NEEDS_TORCH, *SURFACE]
TORCH_FREE = [*PLANNING, *IMAGERY, "views", "exercises"]

# What must not be imported where, beside the order.
NEVER = {
    "pipeline": {"planner"},  # it is handed a plan
    "sample_parallel": {"planner"},
    "views": set(NEEDS_TORCH),  # measured tables reach it as arguments
}

# Extras of pyproject.toml (beside the plain dependencies) that a part may import from.
EXTRAS = {
    **dict.fromkeys(PLANNING, ()),
    **dict.fromkeys(IMAGERY, ("scenes",)),
    **dict.fromkeys(NEEDS_TORCH, ("scenes", "train")),
    "pipeline": ("scenes", "train", "pipe"),
    "views": ("scenes", "lab"),
    "exercises": ("scenes", "lab"),
    "labextensions": ("lab",),
    "doctor": ("train", "pipe", "lab"),
    "lab": ("lab",),
    "app": ("scenes", "train", "lab"),
    "demo": ("lab",),
    "cli": ("scenes", "train", "pipe", "lab"),
    "__main__": (),
    "": (),  # bigunet/__init__.py
}
TORCH_PACKAGES = {"torch", "torchmetrics", "fairscale", "monai"}


def module_name(path: Path) -> str:
    """`bigunet/scenes/open.py` -> `scenes.open`; the package itself is the empty string."""
    parts = path.relative_to(ROOT / "bigunet").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(p): p for p in sorted((ROOT / "bigunet").rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}
MODULES = sorted(FILES)


def unit(name: str) -> str:
    return name.partition(".")[0]


def imported(name: str, tree: ast.AST) -> set[str]:
    """Absolute dotted names that the code under `tree` imports, in functions too."""
    is_package = FILES[name].name == "__init__.py"
    package = ["bigunet", *[p for p in name.split(".") if p]]
    if not is_package:
        package.pop()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            found.update(f"{stem}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            first = node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                found.add(str(first.value))
    return found


def own_imports(name: str) -> set[str]:
    """Modules of bigunet that `name` imports; "" stands for the package's own namespace."""
    found = set()
    for dotted in imported(name, TREES[name]):
        if unit(dotted) == "bigunet":
            inner = dotted.partition(".")[2]
            while inner and inner not in FILES:  # the last part may be a class or a function
                inner = inner.rpartition(".")[0]
            found.add(inner)
    return found - {name}


def third_party(name: str, tree: ast.AST) -> set[str]:
    tops = {unit(dotted) for dotted in imported(name, tree)}
    return {t for t in tops if t != "bigunet" and t not in sys.stdlib_module_names}


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [m for m in MODULES if m])
def test_imports_point_one_way(name: str) -> None:
    assert unit(name) in ORDER, f"give {name} its place in ORDER (tests/test_imports.py)"
    place = ORDER.index(unit(name))
    for other in own_imports(name):
        if other == "":
            assert unit(name) in ("cli", "__main__"), f"{name} imports through the package itself"
            continue
        back = ORDER.index(unit(other)) > place
        assert not back, f"{name} imports {other}, which comes after it"
        assert unit(other) not in NEVER.get(unit(name), ()), f"{name} must not import {other}"


def test_no_cycle_between_files() -> None:
    graph = {name: own_imports(name) for name in MODULES if name}
    packages = {name for name, path in FILES.items() if path.name == "__init__.py"}
    # A file may import its own package's siblings; the package's facade imports the files.
    pruned = {n: {o for o in others if o not in packages} for n, others in graph.items()}
    list(graphlib.TopologicalSorter(pruned).static_order())


@pytest.mark.parametrize("name", [m for m in MODULES if unit(m) in TORCH_FREE])
def test_torch_is_nowhere_in_the_torch_free_parts(name: str) -> None:
    assert not third_party(name, TREES[name]) & TORCH_PACKAGES
    dotted = imported(name, TREES[name])
    assert not [d for d in dotted if d.startswith("safetensors.torch")]


@pytest.mark.parametrize("name", ["", "cli"])
def test_the_surface_defers_torch(name: str) -> None:
    """At module level; functions of the command line may import it."""
    if name not in FILES:
        pytest.fail(f"bigunet/{name}.py is missing")
    level = [n for n in TREES[name].body if isinstance(n, ast.Import | ast.ImportFrom)]
    top = ast.Module(body=list(level), type_ignores=[])
    assert not third_party(name, top) & TORCH_PACKAGES
    units = {unit(d.partition(".")[2]) for d in imported(name, top) if unit(d) == "bigunet"}
    assert not units & set(NEEDS_TORCH)


def test_torch_free_parts_import_where_torch_is_missing() -> None:
    names = [f"bigunet.{m}" if m else "bigunet" for m in MODULES if not m or unit(m) in TORCH_FREE]
    blocked = sorted(TORCH_PACKAGES)
    run_python(
        f"import importlib, sys\nfor b in {blocked}: sys.modules[b] = None\n"
        f"for n in {names}: importlib.import_module(n)"
    )


def test_planning_half_imports_from_a_plain_install() -> None:
    """With every distribution hidden that `pip install bigunet` would not bring."""
    plain = requirement_closure(PROJECT["dependencies"])
    hidden = {
        top
        for top, dists in distributions().items()
        if not {canonical(d) for d in dists} & plain and top != "bigunet"
    }
    names = ["bigunet", *(f"bigunet.{m}" for m in MODULES if unit(m) in PLANNING)]
    assert "torch" in hidden
    run_python(
        "import importlib, sys\n"
        "class Hide:\n"
        "    def __init__(self, finder): self.finder = finder\n"
        "    def __getattr__(self, name): return getattr(self.finder, name)\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        hidden = name.partition('.')[0] in {sorted(hidden)}\n"
        "        return None if hidden else self.finder.find_spec(name, path, target)\n"
        "sys.meta_path[:] = [Hide(finder) for finder in sys.meta_path]\n"
        f"for n in {names}: importlib.import_module(n)"
    )


@pytest.mark.alone
def test_import_is_quick_and_without_torch() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); import bigunet; "
        "print(time.perf_counter() - t, 'torch' in sys.modules)"
    )
    runs = [run_python(code).split() for _ in range(3)]
    assert {torch for _, torch in runs} == {"False"}
    assert min(float(seconds) for seconds, _ in runs) < 1.0


@pytest.mark.parametrize("name", [m for m in MODULES if m != "__main__"])
def test_public_names_are_declared_and_exist(name: str) -> None:
    values = [
        node.value
        for node in TREES[name].body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert len(values) == 1, "each module has one __all__"
    names = ast.literal_eval(values[0])
    assert len(set(names)) == len(names)
    if name == "":
        import bigunet

        missing = [n for n in names if not hasattr(bigunet, n)]
    else:
        missing = sorted(set(names) - bound_names(TREES[name]))
    assert not missing


def bound_names(tree: ast.Module) -> set[str]:
    """Names that a module's own statements bind, those under `if` and `try` too."""
    bound: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.partition(".")[0])
        pending.extend(ast.iter_child_nodes(node))
    return bound


# Third-party packages ---------------------------------------------------------------------------

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", name)[0]).lower()  # type: ignore[index]


def requirement_closure(requirements: list[str]) -> set[str]:
    """The installed distributions that these requirements bring, by canonical name."""
    from packaging.requirements import Requirement

    seen: set[tuple[str, str]] = set()
    pending = [Requirement(r) for r in requirements]
    while pending:
        requirement = pending.pop()
        for extra in ["", *requirement.extras]:
            key = (canonical(requirement.name), extra)
            if key in seen:
                continue
            seen.add(key)
            for text in importlib.metadata.requires(requirement.name) or []:
                inner = Requirement(text)
                if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                    pending.append(inner)
    return {name for name, _ in seen}


@pytest.mark.parametrize("name", MODULES)
def test_third_party_imports_are_declared(name: str) -> None:
    """Each part imports directly only what its extras bring, by a declared requirement."""
    optional = PROJECT["optional-dependencies"]
    allowed = [*PROJECT["dependencies"], *(r for e in EXTRAS[unit(name)] for r in optional[e])]
    assert not undeclared(third_party(name, TREES[name]), allowed)


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_third_party_imports_of_scripts_are_declared(folder: str) -> None:
    everything = [*PROJECT["dependencies"], *sum(PROJECT["optional-dependencies"].values(), [])]
    paths = sorted((ROOT / folder).rglob("*.py"))
    local = {p.stem for p in paths} | {"tests", "benchmarks"}
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tops = {
            unit(alias.name) if isinstance(node, ast.Import) else unit(node.module or "")
            for node in ast.walk(tree)
            if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level)
            for alias in node.names
        }
        tops -= local | sys.stdlib_module_names | {"bigunet", ""}
        assert not undeclared(tops, everything), path.name


@functools.cache
def distributions() -> Mapping[str, list[str]]:
    """Which distributions bring a top-level package; asked once, for it reads every record."""
    return importlib.metadata.packages_distributions()


def undeclared(tops: set[str], requirements: list[str]) -> set[str]:
    declared = {canonical(r) for r in requirements}
    known = distributions()
    return {t for t in tops if not declared & {canonical(d) for d in known.get(t, [t])}}
