"""House rules of single files: length, an opening that says what the file does, no hidden state, the house's words."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "kvist"
MAX_LINES = 400
FOREIGN_WORDS = {"page_table", "page_size", "num_pages", "out_loc", "ref_cnt", "cu_seqlens", "qo_indptr", "kv_indptr"}
"""Other engines' names for what is here a block table, a block size, a slot mapping, a ref count and a query start."""

PYTHON = sorted(path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py"))
NATIVE = sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*") if path.suffix in {".cpp", ".h", ".hpp", ".cc"}
)


def tree(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


def test_the_walk_sees_the_package() -> None:
    assert {"src/kvist/config.py", "src/kvist/kv/spec.py"} <= set(PYTHON)


@pytest.mark.parametrize("name", PYTHON + NATIVE)
def test_a_file_has_one_job(name: str) -> None:
    lines = len((ROOT / name).read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{name} has {lines} lines; a room that outgrows {MAX_LINES} has two jobs"


@pytest.mark.parametrize("name", PYTHON)
def test_a_module_opens_with_what_it_does(name: str) -> None:
    module = tree(name)
    assert ast.get_docstring(module) or not module.body, f"{name} has no docstring"


@pytest.mark.parametrize("name", NATIVE)
def test_a_native_file_opens_with_what_it_does(name: str) -> None:
    path = ROOT / name
    text = path.read_text(encoding="utf-8").lstrip()
    # A .cpp file may leave it to the header that it implements, which it then includes first.
    left_to_header = text.startswith(f'#include "{path.stem}.h"') and path.with_suffix(".h").exists()
    assert text.startswith(("//", "/*")) or left_to_header


def environment_reads(module: ast.Module) -> list[int]:
    """Lines that read the environment, through `os` or through a command-line option's `envvar`."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}

    def reads(node: ast.AST) -> bool:
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=attribute):
                return attribute in names
            case ast.ImportFrom(module="os", names=imported):
                return bool(names & {alias.name for alias in imported})
            case ast.keyword(arg=argument):
                return argument in {"envvar", "auto_envvar_prefix"}
        return False

    return [getattr(node, "lineno", 0) for node in ast.walk(module) if reads(node)]


@pytest.mark.parametrize("name", PYTHON)
def test_only_config_reads_the_environment(name: str) -> None:
    found = environment_reads(tree(name))
    if name == "src/kvist/config.py":
        assert found, "the rule's own example is gone"
    else:
        assert not found, f"{name} reads the environment on lines {found}"


@pytest.mark.parametrize("name", NATIVE)
def test_native_code_reads_no_environment(name: str) -> None:
    assert "getenv" not in (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PYTHON)
def test_no_module_state_is_rebound(name: str) -> None:
    assert not [node.lineno for node in ast.walk(tree(name)) if isinstance(node, ast.Global)]


@pytest.mark.parametrize("name", PYTHON)
def test_the_words_are_the_houses(name: str) -> None:
    used = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.arg):
            used.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            used.add(node.name)
    assert not used & FOREIGN_WORDS, f"{name} uses {sorted(used & FOREIGN_WORDS)}"
