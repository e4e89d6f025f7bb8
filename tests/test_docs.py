"""The API reference: every public name says what it is, and its pages are built without a word."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "bigunet").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_public_names_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "a module says what it is for"
    public: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            public = set(ast.literal_eval(node.value))
    silent = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and node.name in public
        and not ast.get_docstring(node)
    ]
    assert not silent


def test_the_reference_is_built_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "make_reference.py"), str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Warn" not in done.stderr, done.stderr
    page = (tmp_path / "bigunet" / "mosaic.html").read_text(encoding="utf-8")
    assert "memory_bytes" in page
    tops = {path.relative_to(ROOT / "bigunet").parts[0].removesuffix(".py") for path in FILES}
    pages = {path.stem for path in (tmp_path / "bigunet").glob("*.html")}
    assert pages == tops - {"__init__", "__main__", "cli"}
