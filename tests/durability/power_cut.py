"""What a folder may hold after a power cut: files without what was not synced, names without what was not synced.

A recorder watches the product's calls. Before each it looks at the folder as it is, and remembers what was synced: the
content of files and the entries of folders. From both it makes images of the disk.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hybridindex.filesystem import Call

__all__ = ["IMAGES", "Recorder", "write_image"]

#: names: as they are, or as their folders were synced. bytes: as they are, as synced, or the first half of what is not.
Image = tuple[Literal["now", "synced"], Literal["now", "synced", "torn"]]
IMAGES: tuple[Image, ...] = (("now", "now"), ("now", "synced"), ("now", "torn"), ("synced", "synced"))

#: A folder's entries: numbers of nodes by name.
Names = dict[str, int]


@dataclass(slots=True)
class Node:
    """A file, folder or link, whatever its name is."""

    kind: Literal["file", "folder", "link"]
    #: Content now, and as it was synced; of a link its target.
    now: bytes = b""
    synced: bytes = b""
    names: Names = field(default_factory=dict)
    synced_names: Names = field(default_factory=dict)


class Recorder:
    """For ``filesystem.watched_by``; what it found is in :attr:`cuts`. One thread."""

    def __init__(self, folder: Path, *, but: tuple[str, ...] = ()) -> None:
        """``but``: ends of names of files that nobody needs after a power cut."""
        self._folder = folder
        self._but = but
        self._numbers = itertools.count()
        #: By inode, which is used again when a file is gone.
        self._known: dict[int, int] = {}
        self._nodes: dict[int, Node] = {}
        self._pending: Call | None = None
        self._root = self._look(folder)
        for node in self._nodes.values():
            node.synced, node.synced_names = node.now, dict(node.names)
        #: Images by what is in them, and the call before which the power was cut.
        self.cuts: dict[tuple[object, ...], Call] = {}
        #: The last image of what was synced.
        self.acknowledged: tuple[object, ...] = ()

    def __call__(self, call: Call) -> None:
        if not Path(call.path).is_relative_to(self._folder):
            return
        self._take(call)
        self._pending = call

    def mark(self, path: Path) -> None:
        """Another library has synced a file, and its name in its folder."""
        self._look(self._folder)
        folder, file = (self._nodes[self._known[each.stat().st_ino]] for each in (path.parent, path))
        file.synced = file.now
        folder.synced_names[path.name] = folder.names[path.name]

    def end(self) -> None:
        """After the last call."""
        end = Call(name="end", path=str(self._folder))
        self._take(end)
        self.acknowledged = self._image(("synced", "synced"))

    def _take(self, call: Call) -> None:
        there = set(_inodes(self._folder))
        self._known = {inode: number for inode, number in self._known.items() if inode in there}
        self._look(self._folder)
        if self._pending is not None and self._pending.name in ("sync", "sync_folder"):
            self._synced(self._pending)
        for image in IMAGES:
            self.cuts.setdefault(self._image(image), call)

    def _synced(self, call: Call) -> None:
        node = self._nodes.get(self._known.get(Path(call.path).stat().st_ino, -1))
        if node is None:
            return
        if call.name == "sync":
            node.synced = node.now
        else:
            node.synced_names = dict(node.names)

    def _look(self, path: Path) -> int:
        inode = path.lstat().st_ino
        if inode not in self._known:
            self._known[inode] = next(self._numbers)
            kind: Literal["file", "folder", "link"] = (
                "link" if path.is_symlink() else "folder" if path.is_dir() else "file"
            )
            self._nodes[self._known[inode]] = Node(kind=kind)
        number = self._known[inode]
        node = self._nodes[number]
        if node.kind == "folder":
            entries = [entry for entry in sorted(path.iterdir()) if not entry.name.endswith(self._but or (" ",))]
            node.names = {entry.name: self._look(entry) for entry in entries}
        elif node.kind == "link":
            node.now = node.synced = os.readlink(path).encode()
        else:
            node.now = path.read_bytes()
        return number

    def _image(self, image: Image) -> tuple[object, ...]:
        names, content = image

        def of(number: int) -> tuple[object, ...]:
            node = self._nodes[number]
            if node.kind == "folder":
                entries = node.names if names == "now" else node.synced_names
                return ("folder", *((name, of(inner)) for name, inner in entries.items()))
            if node.kind == "link" or content == "now":
                return (node.kind, node.now)
            if content == "torn" and node.now != node.synced:
                # What was appended, or all where it is another content.
                kept = len(node.synced) if node.now.startswith(node.synced) else 0
                return (node.kind, node.now[: kept + (len(node.now) - kept) // 2])
            return (node.kind, node.synced)

        return of(self._root)


def _inodes(folder: Path) -> Iterator[int]:
    yield folder.lstat().st_ino
    for where, folders, files in os.walk(folder):
        yield from (os.lstat(os.path.join(where, name)).st_ino for name in (*folders, *files))


def write_image(image: tuple[Any, ...], path: Path) -> None:
    """Makes ``path`` hold it."""
    kind, *rest = image
    if kind == "folder":
        path.mkdir()
        for name, inner in rest:
            write_image(inner, path / name)
    elif kind == "link":
        path.symlink_to(rest[0].decode())
    else:
        path.write_bytes(rest[0])
