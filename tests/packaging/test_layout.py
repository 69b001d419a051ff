"""The tree itself: links, packages, who may import whom, no circles, folders that a reader can survey.

docs/architecture.md tells the same in words; changing a table here is a decision (docs/adr).
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import hybridindex

ROOT = Path(__file__).resolve().parents[2]
#: Rooms that stand at the top of the repository and are linked into the package.
TOP = ("profiler", "partitioner", "router", "migrations")
#: Folders of source files.
SOURCES = {".py", ".cpp", ".h", ".js", ".css", ".html"}
MOST_FILES, MOST_AT_THE_ROOT = 16, 13

#: Shared by all rooms; they import nothing but each other.
SHARED = {
    *("types", "errors", "filesystem", "paging", "config", "extension", "online_fit", "answer_codec", "processes"),
    "bearer",
}
#: Not files: the compiled kernels, and what the package itself says.
NOT_FILES = {"_native", "__version__"}
#: Room -> the rooms that it may import.
ALLOWED = {
    "index": set(),
    "tiers": {"index"},
    "store": set(),
    # Its tables are the store's; the store runs it as scripts.
    "migrations": {"store"},
    "partitioner": set(),
    "llm": set(),
    "router": {"index", "tiers", "partitioner"},
    "profiler": {"index", "tiers", "llm", "partitioner", "router"},
    "plans": {"index", "partitioner", "profiler", "store", "tiers"},
    "api": {"index", "partitioner", "profiler", "router", "plans", "store"},
    "refresh": {"index", "tiers", "partitioner", "profiler", "router", "plans", "store"},
    # Documents that come are embedded as those of an ingest are.
    "service": {"index", "tiers", "partitioner", "router", "plans", "store", "api", "refresh", "rag"},
    "client": set(),
    # Starts daemons, and asks them what their clients ask.
    "cluster": {"index", "partitioner", "router", "api", "client", "service"},
    # Collections change an index and the texts of its rows together; servers of models answer in the clients' time.
    "rag": {"llm", "index", "api", "client"},
    # Puts the daemon's routes into vLLM's server, whose arguments come from a plan; retrievers of other frameworks.
    "integrations": {"partitioner", "rag", "service"},
    # What no server imports. Policies are those of the router and the refresh.
    "studies": {"partitioner", "router", "plans", "refresh"},
    "report": {"partitioner", "studies"},
    "demo": {"partitioner", "profiler", "rag", "router", "studies", "tiers"},
}
#: The command line alone imports everything.
ABOVE = {"cli", "__main__", "old_paths"}

#: Room -> its sub-rooms and files from the bottom up: each imports itself and what stands before it. "." are the files
#: that have no entry of their own.
ORDER = {
    "index": (
        *("storage", "pq", "rabitq", "attributes", "log", "inputs", "integrity", "share", ".", "filters", "changes"),
        "faiss_files",
    ),
    "tiers": ("contract", "host", "paged", "shard", "."),
    "router": ("batch", "lookahead", "remote", "devices", "."),
    "partitioner": ("models", "nodes", "."),
    "profiler": (".", "llm"),
    "service.http": ("page", ".", "nodes", "routes", "app"),
    "service": (
        *("intake", "cluster", ".", "changes", "core", "status", "pruning", "several", "observe", "http", "daemon"),
    ),
    "rag": (".", "embedders", "collection", "ingest", "pipelines"),
    "cli": (".", "commands", "main", "entry"),
    "studies": ("hardware", "schedule", "simulator", "cluster", "what_if"),
    "studies.schedule": ("stages", "."),
}
#: No I/O, clock, thread, randomness of their own.
PURE = {"torch", "faiss", "sqlalchemy", "threading", "time", "random", "os", "subprocess"}
PURE_FILES = (
    "partitioner",
    "router/batch/batching.py",
    "router/lookahead/hotness.py",
    "router/lookahead/grouping.py",
    "hybridindex/refresh/drift.py",
    "hybridindex/refresh/update_cycle.py",
    "hybridindex/plans/replan.py",
)


@cache
def files() -> dict[str, Path]:
    """Module name -> file, of the whole product."""
    found = {}
    for path in [*(ROOT / "hybridindex").rglob("*.py"), *(p for room in TOP for p in (ROOT / room).rglob("*.py"))]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] == "hybridindex" and parts[1] in TOP:
            continue  # through a link
        name = ".".join(parts if parts[0] == "hybridindex" else ("hybridindex", *parts))
        found[name.removesuffix(".__init__")] = path
    assert len(found) > 200
    return found


@cache
def imports(name: str) -> frozenset[str]:
    """What a module imports, anywhere in it and for types too: modules of ours by their own name."""
    names = set()
    for node in ast.walk(ast.parse(files()[name].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} uses a relative import"
            module = node.module or ""
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                names.add(inner if inner in files() or module == "hybridindex" else module)
    return frozenset(names)


def room_of(name: str) -> str:
    """ "hybridindex.router.batch.split" -> "router"."""
    return name.split(".")[1] if "." in name else "__init__"


def in_room(room: str) -> list[str]:
    found = [name for name in files() if room_of(name) == room]
    assert found, f"there is no {room}"
    return found


@pytest.mark.parametrize("room", TOP)
def test_links_resolve_to_the_top_level_rooms(room):
    link = ROOT / "hybridindex" / room
    assert link.is_symlink()
    assert link.resolve() == ROOT / room


def test_declared_packages_are_the_folders_with_an_init():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"]["packages"]
    assert declared == {"hybridindex": "hybridindex", **{f"hybridindex/{room}": room for room in TOP}}
    for path in files().values():
        assert (path.parent / "__init__.py").exists(), f"{path.parent} is no package"


def test_every_room_has_its_arrows():
    rooms = {room_of(name) for name in files()} - SHARED - ABOVE - {"__init__"}
    assert rooms == set(ALLOWED)


@pytest.mark.parametrize("room", [*ALLOWED, *sorted(SHARED)])
def test_arrows_between_rooms_point_one_way(room):
    may = {room, *SHARED, *NOT_FILES} | ALLOWED.get(room, set())
    for name in in_room(room):
        for imported in imports(name):
            assert imported.split(".")[0] not in TOP, f"{name} imports the bare name {imported}"
            if imported.startswith("hybridindex."):
                assert room_of(imported) in may, f"{name} imports {imported}"


def test_every_arrow_that_is_allowed_is_there():
    for room, may in ALLOWED.items():
        used = {room_of(imported) for name in in_room(room) for imported in imports(name)}
        assert may <= used, f"{room} need not import {may - used}"


@pytest.mark.parametrize("room", ORDER)
def test_sub_rooms_import_only_what_stands_below_them(room):
    order, prefix = ORDER[room], f"hybridindex.{room}."
    inside = [name for name in files() if name.startswith(prefix)]

    def head(name: str) -> str:
        return name.removeprefix(prefix).split(".")[0]

    def place(name: str) -> int:
        return order.index(head(name) if head(name) in order else ".")

    assert set(order) - {"."} <= {head(name) for name in inside}, f"{room} lacks a sub-room of its order"
    # What __init__.py exports is below it.
    for name in [name for name in inside if files()[name].name != "__init__.py"]:
        for imported in imports(name):
            if imported.startswith(prefix):
                assert place(imported) <= place(name), f"{name} imports {imported}"


def test_files_import_each_other_in_no_circle():
    done: set[str] = set()
    under_way: list[str] = []

    def visit(name: str) -> None:
        if name in under_way:
            pytest.fail("a circle: " + " -> ".join([*under_way[under_way.index(name) :], name]))
        if name in done:
            return
        under_way.append(name)
        for imported in sorted(imports(name)):
            if imported in files():
                visit(imported)
        done.add(under_way.pop())

    for name in files():
        visit(name)


@pytest.mark.parametrize("where", PURE_FILES)
def test_what_decides_is_pure(where):
    path = ROOT / where
    for name in [name for name, file in files().items() if file == path or path in file.parents] or [where]:
        used = {imported.split(".")[0] for imported in imports(name)} & PURE
        assert not used, f"{name} imports {used}"


def test_no_folder_holds_more_files_than_one_can_survey():
    for top in ("hybridindex", *TOP):
        for folder in [ROOT / top, *(p for p in (ROOT / top).rglob("*") if p.is_dir())]:
            found = [p for p in folder.iterdir() if p.suffix in SOURCES]
            assert len(found) <= MOST_FILES, f"{folder} holds {len(found)} files"
    assert len(list((ROOT / "hybridindex").glob("*.py"))) <= MOST_AT_THE_ROOT


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
        "VectorFile",
        "__version__",
        "build",
        "from_faiss",
        "open",
        "remove_replaced",
        "restore",
        "rollback",
    ]
    for name in hybridindex.__all__:
        assert hasattr(hybridindex, name)
    for method in ("profile", "plan", "router", "search", "centroids", "list_sizes"):
        assert hasattr(hybridindex.Index, method)


def test_version_is_said_once():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert declared == hybridindex.__version__


#: What takes a tenth of a second and more, or a device.
HEAVY = {"faiss", "torch", "triton", "matplotlib", "fastapi", "uvicorn", "scipy.special", "scipy.optimize"}
#: What the library, and a command that needs no index, do without.
USED_BY_SOME = HEAVY | {"scipy", "sqlalchemy", "alembic", "httpx"}


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import hybridindex", USED_BY_SOME),
        ("from hybridindex.cli.main import make_app; make_app()", HEAVY),
        ("import sys; sys.argv[1:] = ['--version']; from hybridindex.cli.entry import run; run()", {"typer", "rich"}),
        ("import hybridindex.cli.main as cli; cli.make_app('build')", USED_BY_SOME),
    ],
    ids=["library", "all commands", "version", "build"],
)
def test_importing_loads_nothing_heavy(code, heavy):
    code += f"; import sys; print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.splitlines()[-1] == "[]"
