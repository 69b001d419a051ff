"""No room goes past ``hybridindex.filesystem``: what it calls by itself is neither typed, nor seen by the tests of
faults. Calls of libraries that open files by themselves stand in a ``with filesystem.performing(...)``."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.packaging.test_layout import files, room_of

#: ``module.function`` that takes or gives a file. "open" is the builtin. What resolves links meets no error: it ignores
#: them all.
FUNCTIONS = {
    "open",
    "io.open",
    "mmap.mmap",
    "fcntl.flock",
    "fcntl.lockf",
    "filelock.FileLock",
    "FileLock",
    "hashlib.file_digest",
    "sqlite3.connect",
    "zipfile.ZipFile",
    "h5py.File",
    "pq.ParquetFile",
    "pa.memory_map",
    "faiss.read_index",
    "faiss.write_index",
    "np.lib.format.open_memmap",
    *(f"np.{name}" for name in ("fromfile", "load", "loadtxt", "memmap", "save", "savetxt", "savez")),
    *(f"os.path.{name}" for name in ("exists", "getsize", "isdir", "isfile", "islink")),
    *(f"shutil.{name}" for name in ("copy", "copy2", "copyfile", "copytree", "disk_usage", "move", "rmtree")),
    *(
        f"tempfile.{name}"
        for name in ("NamedTemporaryFile", "TemporaryDirectory", "TemporaryFile", "mkdtemp", "mkstemp")
    ),
    *(f"os.{name}" for name in ("access", "chmod", "chown", "fdatasync", "fstat", "fsync", "ftruncate", "link")),
    *(f"os.{name}" for name in ("listdir", "lstat")),
    *(f"os.{name}" for name in ("makedirs", "mkdir", "open", "posix_fallocate", "pread", "pwrite", "readlink")),
    *(f"os.{name}" for name in ("remove", "rename", "renames", "replace", "rmdir", "scandir", "stat", "statvfs")),
    *(f"os.{name}" for name in ("symlink", "truncate", "unlink", "utime", "walk")),
}
#: Methods of paths and arrays, whatever the object's name is.
METHODS = {
    *("chmod", "exists", "glob", "hardlink_to", "is_dir", "is_file", "is_socket", "is_symlink", "iterdir", "lstat"),
    *("mkdir", "read_bytes", "read_text", "readlink", "rename", "rglob", "rmdir", "samefile", "stat", "symlink_to"),
    *("tofile", "touch", "unlink", "write_bytes", "write_text"),
}
PACKAGE_DATA = "data of the package, which may lie in an archive"
MEMORY = "anonymous memory"
ANSWER = "of an open file; an error is an answer"
NO_FILE = "opens no file"
SEEN = "within a function of its own that performs it"
#: (module, what it calls) -> why it does not go through ``filesystem``.
ALLOWED = {
    ("hybridindex.studies.hardware", "iterdir"): PACKAGE_DATA,
    ("hybridindex.studies.hardware", "read_bytes"): PACKAGE_DATA,
    ("hybridindex.studies.schedule.stages.schema", "iterdir"): PACKAGE_DATA,
    ("hybridindex.studies.schedule.stages.schema", "read_bytes"): PACKAGE_DATA,
    ("hybridindex.service.http.page.files", "read_bytes"): PACKAGE_DATA,
    ("hybridindex.tiers.contract.address_range", "mmap.mmap"): MEMORY,
    ("hybridindex.index.storage.huge_pages", "mmap.mmap"): MEMORY,
    ("hybridindex.index.changes.shape_process", "mmap.mmap"): MEMORY,
    ("hybridindex.index.changes.shape_process", "os.ftruncate"): MEMORY,
    ("hybridindex.processes", "fcntl.flock"): "gives a lock back, of an open file",
    ("hybridindex.processes", "os.open"): SEEN,
    ("hybridindex.tiers.shard.scanner", "os.ftruncate"): MEMORY,
    ("hybridindex.tiers.shard.scanner", "os.pwrite"): MEMORY,
    ("hybridindex.index.faiss_model", "faiss.read_index"): "from bytes in memory",
    ("hybridindex.index.faiss_model", "faiss.write_index"): "to a function that writes to a file of ours",
    ("hybridindex.index.inputs.columns", "pq.ParquetFile"): SEEN,
    ("hybridindex.index.inputs.columns", "pa.memory_map"): SEEN,
    ("hybridindex.index.inputs.hdf5", "h5py.File"): SEEN,
    ("hybridindex.index.storage.mapped_lists", "os.fstat"): ANSWER,
    ("hybridindex.rag.steps", "open"): NO_FILE,
    ("hybridindex.demo.queries", "zipfile.ZipFile"): "from bytes in memory",
    ("hybridindex.profiler.llm.offline_point", "read_text"): "a process of its own, without this package",
    ("hybridindex.profiler.llm.offline_point", "write_text"): "a process of its own, without this package",
}


def name_of(node: ast.expr) -> str:
    """ "np.lib.format.open_memmap" of such an expression; empty for another."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = name_of(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def is_of_a_file(call: ast.Call) -> str:
    """The name under which a call on a file is listed; empty for another call."""
    name = name_of(call.func)
    if name in FUNCTIONS:
        return name
    if not isinstance(call.func, ast.Attribute) or name.startswith("filesystem."):
        return ""
    method = call.func.attr
    if method in METHODS:
        return method
    # Path.replace takes one name; str.replace two, dataclasses.replace an object and fields.
    if method == "replace" and len(call.args) == 1 and not call.keywords and name != "dataclasses.replace":
        return method
    if method == "open" and not call.args and not call.keywords:
        return method
    first = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
    opens = isinstance(first, str) and set(first) <= set("rwaxbt+")
    if method == "open" and (opens or {k.arg for k in call.keywords} & {"mode", "encoding", "newline", "buffering"}):
        return method
    return ""


def imported(node: ast.ImportFrom) -> list[str]:
    """What of FUNCTIONS would be called without its module's name."""
    names = [alias.name for alias in node.names if alias.name not in FUNCTIONS]
    return [whole for name in names if (whole := f"{node.module}.{name}") in FUNCTIONS]


def past_us(node: ast.AST) -> Iterator[ast.Call]:
    """Calls below ``node`` outside ``with filesystem.performing(...)``."""
    if isinstance(node, ast.With | ast.AsyncWith):
        within = [name_of(item.context_expr.func) for item in node.items if isinstance(item.context_expr, ast.Call)]
        if "filesystem.performing" in within:
            return
    if isinstance(node, ast.Call):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from past_us(child)


def found_in(text: str) -> list[str]:
    tree = ast.parse(text)
    bare = [name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in imported(node)]
    return bare + [name for call in past_us(tree) if (name := is_of_a_file(call))]


@pytest.mark.parametrize("room", sorted({room_of(name) for name in files()} - {"filesystem"}))
def test_every_call_on_a_file_goes_through_filesystem(room):
    past = [
        (name, called)
        for name, path in files().items()
        if room_of(name) == room
        for called in found_in(path.read_text())
        if (name, called) not in ALLOWED
    ]
    assert not past, f"call hybridindex.filesystem instead: {past}"


def test_what_is_allowed_is_there():
    for name, called in ALLOWED:
        assert called in found_in(files()[name].read_text()), f"{name} calls no {called} any more"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("open('x')", ["open"]),
        ("path.open('rb')", ["open"]),
        ("path.open()", ["open"]),
        ("store.open(path)", []),
        ("from shutil import rmtree", ["shutil.rmtree"]),
        ("from os import PathLike", []),
        ("path.replace(other)", ["replace"]),
        ("text.replace('a', 'b')", []),
        ("os.fsync(fd)", ["os.fsync"]),
        ("with filesystem.performing('sqlite', p), closing(sqlite3.connect(p)) as db:\n  os.stat(p)", []),
        ("with other():\n  sqlite3.connect(p)", ["sqlite3.connect"]),
        ("filesystem.unlink(p)", []),
        ("p.unlink()", ["unlink"]),
    ],
)
def test_the_rule(text, found):
    assert found_in(text) == found
