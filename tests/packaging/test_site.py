"""The documentation as a site: it builds without a warning, and has every command, option, route and public name."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Modules whose public names programs use; the site shows them.
PUBLIC = (
    "hybridindex",
    "hybridindex.client",
    "hybridindex.cluster",
    "hybridindex.rag",
    "hybridindex.integrations.langchain",
    "hybridindex.integrations.llamaindex",
    "hybridindex.integrations.haystack",
    "hybridindex.integrations.haystack_store",
)


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs/hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Text of each page by its name."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    pages = {file.stem: file.read_text() for file in folder.glob("*.html")}
    return {name: unescape(re.sub(r"<[^>]+>", "", text)) for name, text in pages.items()}


@pytest.mark.timeout(1000)
def test_every_page_is_there(site):
    pages = {file.stem for file in (ROOT / "docs").glob("*.md")}
    assert pages <= set(site)
    for name in pages:
        assert "<!-- reference" not in site[name], name


@pytest.mark.timeout(1000)
def test_every_command_and_option_is_there_with_its_help(site, hooks):
    page, leaves = site["commands"], list(hooks.leaves(hooks.typer.main.get_command(hooks.make_app())))
    assert len(leaves) > 30
    for name, command in leaves:
        assert name in page
        assert command.help, f"{name} does not say what it does"
        for each in command.params:
            assert each.help, f"{each.name} of {name} does not say what it means"
            if each.param_type_name == "option" and not each.hidden:
                assert each.opts[0] in page, f"{each.opts[0]} of {name} is missing"


@pytest.mark.timeout(1000)
def test_every_route_is_there(site, hooks):
    routes = [(path, method) for path, methods in hooks.openapi()["paths"].items() for method in methods]
    assert len(routes) > 20
    for path, method in routes:
        assert f"{method.upper()} {path}" in site["http"]


#: A logger, and a span of traces.
NO_PYTHON = {"hybridindex.audit", "hybridindex.queue"}


def file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.exists()), None)


def parsed(module: str) -> ast.Module:
    """Read, not imported: frameworks that it needs may not be here."""
    file = file_of(module)
    assert file, f"there is no module {module}"
    return ast.parse(file.read_text())


def public(module: str) -> list[str]:
    (names,) = [
        ast.literal_eval(node.value)
        for node in parsed(module).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return names


def without_docstring(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    """Of a class and of what programs may call of it; what a base class says is of another one."""
    found = [] if ast.get_docstring(node) else [node.name]
    if isinstance(node, ast.ClassDef) and not node.bases:
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and not each.name.startswith("_") and not ast.get_docstring(each):
                found.append(f"{node.name}.{each.name}")
    return found


def source(module: str, name: str) -> ast.stmt:
    """Where it is defined."""
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in ast.unparse(node).split("=")[0]:
            return node
        if isinstance(node, ast.ImportFrom):
            for each in node.names:
                if name == (each.asname or each.name):
                    return source(node.module, each.name)
    raise AssertionError(f"{module} does not define {name}")


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_there_and_says_what_it_is(site, module):
    for name in public(module):
        defined = source(module, name)
        if isinstance(defined, ast.ClassDef | ast.FunctionDef):
            assert not without_docstring(defined), module
            assert defined.name in site["python"], f"{module}.{name} is missing"
        else:
            assert name == "__version__" or name in site["python"], f"{module}.{name} is missing"


def blocks() -> Iterator[tuple[Path, ast.Module]]:
    """Python of the documents and examples."""
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    for file in sorted(documents):
        for text in re.findall(r"```python\n(.*?)```", file.read_text(), re.DOTALL):
            yield file, ast.parse(textwrap.dedent(text))
    for file in sorted((ROOT / "examples").rglob("*.py")):
        yield file, ast.parse(file.read_text())


def test_programs_of_the_documents_use_public_names():
    seen = set()
    for file, program in blocks():
        for node in ast.walk(program):
            if isinstance(node, ast.Import):
                used = {each.name for each in node.names if each.name.startswith("hybridindex")}
                assert used <= set(PUBLIC), f"{file} imports {used - set(PUBLIC)}"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hybridindex"):
                assert node.module in PUBLIC, f"{file} imports from {node.module}"
                names = {each.name for each in node.names}
                assert names <= set(public(node.module)), f"{file} imports {names} from {node.module}"
                seen |= names
    assert {"Client", "Retriever", "HybridIndexVectorStore"} <= seen


def test_what_documents_name_in_text_is_there():
    """``hybridindex.a.b`` between backticks: a module, or a name in one."""
    named = {
        name
        for file in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for name in re.findall(r"`(hybridindex(?:\.[A-Za-z_]\w*)+)(?:\(\))?`", file.read_text())
    }
    assert len(named) > 20
    for name in sorted(named - NO_PYTHON):
        module, _, last = name.rpartition(".")
        assert file_of(name) or source(module, last), name
