"""The tree itself: links resolve, every room is a declared package, imports point the way architecture.md says."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

import hybridindex

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("profiler", "partitioner", "router", "migrations")

#: room -> rooms of hybridindex it may import (besides itself, types, errors and paging).
ALLOWED = {
    "index": set(),
    "tiers": {"index"},
    "store": {"migrations"},
    "migrations": {"store"},
    "partitioner": set(),
    # Event streams of LLM servers, for all who talk to one.
    "llm": set(),
    "profiler": {"index", "tiers", "llm"},
    "router": {"index", "tiers", "partitioner"},
    # A daemon serves what the facade opens; it shares the binary answers with its clients, and nothing else.
    "service": {"facade", "committed", "store", "router", "partitioner", "profiler", "tiers", "answers", "__version__"},
    "client": {"answers"},
    # Puts the daemon's routes into vLLM's server, whose arguments come from a plan; retrievers of other frameworks.
    "integrations": {"service", "partitioner", "rag"},
    # Pipelines know sessions, generators and stores by protocol: routers and clients come from outside.
    "rag": {"llm"},
    # Virtual time: what the router decides is asked of its pure parts.
    "simulator": {"partitioner", "router"},
}
SHARED = {"types", "errors", "config", "paging", "extension", "running"}
#: May import the daemon and its clients.
ABOVE = {"cli", "service", "client", "integrations"}
PURE = {"torch", "faiss", "sqlalchemy", "threading", "time", "random", "os", "subprocess"}


def modules(room: str) -> list[Path]:
    folder = ROOT / room if room in ROOMS else ROOT / "hybridindex" / room
    found = sorted(folder.rglob("*.py"))
    assert found
    return found


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            module = node.module or ""
            names |= {f"{module}.{alias.name}" for alias in node.names} if module == "hybridindex" else {module}
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_links_resolve_to_the_top_level_rooms(room):
    link = ROOT / "hybridindex" / room
    assert link.is_symlink()
    assert link.resolve() == ROOT / room


def test_declared_packages_are_the_folders_with_an_init():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"]["packages"]
    assert declared == {"hybridindex": "hybridindex", **{f"hybridindex/{room}": room for room in ROOMS}}
    for folder in declared.values():
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} is no package"


@pytest.mark.parametrize("room", ALLOWED)
def test_arrows_point_the_right_way(room):
    for path in modules(room):
        for name in imports(path):
            head, _, rest = name.partition(".")
            if head in ROOMS:
                pytest.fail(f"{path} imports the bare name {name}")
            if head == "hybridindex" and rest:
                target = rest.split(".")[0]
                assert target in {room, *SHARED} | ALLOWED[room], f"{path} imports {name}"


def test_nobody_but_the_command_line_imports_the_daemon_or_its_clients():
    for path in (ROOT / "hybridindex").rglob("*.py"):
        room = path.relative_to(ROOT / "hybridindex").parts[0]
        if room not in ABOVE:
            used = {name.split(".")[1] for name in imports(path) if name.startswith("hybridindex.")}
            assert not used & {"service", "client"}, f"{path} imports {used & {'service', 'client'}}"


def test_partitioner_is_pure():
    for path in modules("partitioner"):
        used = {name.split(".")[0] for name in imports(path)} & PURE
        assert not used, f"{path} imports {used}"


@pytest.mark.parametrize("file", ["batching.py", "hotness.py", "grouping.py", "drift.py", "update_cycle.py"])
def test_policies_of_the_router_are_pure(file):
    used = {name.split(".")[0] for name in imports(ROOT / "router" / file)} & PURE
    assert not used, f"router/{file} imports {used}"


def test_public_names():
    assert hybridindex.__all__ == [
        "HealthPolicy",
        "HybridIndexError",
        "Index",
        "LLMProfile",
        "Profile",
        "RouterConfig",
        "SearchParams",
        "SearchResult",
        "__version__",
        "build",
        "from_faiss",
        "open",
    ]
    for name in hybridindex.__all__:
        assert hasattr(hybridindex, name)
    for method in ("profile", "plan", "router", "centroids", "list_sizes"):
        assert hasattr(hybridindex.Index, method)


def test_version_is_said_once():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert declared == hybridindex.__version__


#: What takes a tenth of a second and more, or a device.
HEAVY = {"faiss", "torch", "triton", "matplotlib", "fastapi", "uvicorn", "scipy.special", "scipy.optimize"}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [("hybridindex", HEAVY | {"scipy", "sqlalchemy", "httpx"}), ("hybridindex.cli.main", HEAVY)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_importing_loads_nothing_heavy(module, heavy):
    import subprocess
    import sys

    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"
