"""A disk that a seed makes fail: what of a folder survives a power cut.

It sees the product's calls before they are made and keeps, beside what files and folders hold now, what was synced and
what came since. A power cut keeps the first, and of the rest what the seed draws: whole writes, none, single blocks of
them, a beginning; of names that were given and taken since their folder was synced, a beginning. Calls are also made on
the real folder, which then is what the operating system has: the end of a process loses nothing of that.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from hybridindex.filesystem import Call, File
from hybridindex.index.log.change_log import LogFile, LogState

__all__ = ["SimDisk"]

#: Of what is written to a disk at once.
_BLOCKS = (64, 512, 4096)


@dataclass(slots=True)
class _Write:
    """Bytes at an offset; None: all behind it is cut off."""

    offset: int
    data: bytes | None
    #: A sync failed: the system believes that it is on disk, and no later one writes it.
    forgotten: bool = False

    def apply(self, content: bytearray) -> None:
        if self.data is None:
            del content[self.offset :]
            content.extend(bytes(self.offset - len(content)))
            return
        content.extend(bytes(max(0, self.offset - len(content))))
        content[self.offset : self.offset + len(self.data)] = self.data


@dataclass(slots=True, eq=False)
class _File:
    now: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    since: list[_Write] = field(default_factory=list)
    #: When it was changed last, in changes of all files.
    changed: int = field(default_factory=itertools.count().__next__)

    def write(self, change: _Write) -> None:
        change.apply(self.now)
        self.changed = _File().changed
        if change.data is None:
            self.since = [each for each in self.since if not each.forgotten or each.offset < change.offset]
        else:
            end = change.offset + len(change.data)
            self.since = [
                each
                for each in self.since
                if not (each.forgotten and each.data is not None)
                or each.offset < change.offset
                or each.offset + len(each.data) > end
            ]
        self.since.append(change)

    def sync(self) -> None:
        content = bytearray(self.synced)
        for each in self.since:
            if not each.forgotten:
                each.apply(content)
        self.synced = bytes(content)
        self.since = [each for each in self.since if each.forgotten]

    def after_cut(self, draw: random.Random) -> bytes:
        how = draw.randrange(5)
        if how == 0 or not self.since:
            return self.synced
        if how == 1:
            return bytes(self.now)
        content = bytearray(self.synced)
        if how == 2:  # in order, up to somewhere in one of them
            n = draw.randrange(len(self.since))
            for each in self.since[:n]:
                each.apply(content)
            last = self.since[n]
            if last.data is not None:
                _Write(last.offset, last.data[: draw.randrange(len(last.data) + 1)]).apply(content)
            return bytes(content)
        block, kept = draw.choice(_BLOCKS), draw.choice((0.2, 0.5, 0.9))
        for each in self.since:
            if each.data is None:
                if draw.random() < kept:
                    each.apply(content)
                continue
            at = each.offset
            while at < (end := each.offset + len(each.data)):
                until = min(end, (at // block + 1) * block)
                if draw.random() < kept:
                    _Write(at, each.data[at - each.offset : until - each.offset]).apply(content)
                at = until
        return bytes(content)


@dataclass(slots=True, eq=False)
class _Folder:
    now: dict[str, _File | _Folder] = field(default_factory=dict)
    synced: dict[str, _File | _Folder] = field(default_factory=dict)
    #: (name that is taken away or "", name that is given or "", what has it).
    since: list[tuple[str, str, _File | _Folder]] = field(default_factory=list)

    def change(self, gone: str, given: str, node: _File | _Folder) -> None:
        _rename(self.now, gone, given, node)
        self.since.append((gone, given, node))

    def sync(self) -> None:
        self.synced, self.since = dict(self.now), []

    def after_cut(self, draw: random.Random) -> dict[str, _File | _Folder]:
        names, n = dict(self.synced), len(self.since)
        for gone, given, node in self.since[: draw.choice((0, n, draw.randrange(n + 1)))]:
            _rename(names, gone, given, node)
        return names


def _rename(names: dict[str, _File | _Folder], gone: str, given: str, node: _File | _Folder) -> None:
    if gone:
        names.pop(gone, None)
    if given:
        names[given] = node


class SimDisk:
    """Of one folder."""

    def __init__(self, root: Path) -> None:
        """All that is there now is safe."""
        self.root = root
        self._prefix = f"{root}{os.sep}"
        self._top = _read(root)
        #: Of cuts that come, by path: their calls do not say.
        self._sizes: dict[str, int] = {}

    @contextmanager
    def known(self) -> Iterator[None]:
        """Within the block, files say to what size they are cut, and a file that takes another's place has its number,
        as on file systems that use numbers again."""

        def state(log: LogFile, found: Callable[[LogFile], LogState] = LogFile.state) -> LogState:
            _, size, _ = found(log)
            file = self._find(str(log.path))
            return (1, size, file.changed) if isinstance(file, _File) else (0, 0, 0)

        def telling(method: Any) -> Any:
            def tell(file: File, nbytes: int) -> None:
                self._sizes[file._path] = nbytes
                method(file, nbytes)

            return tell

        with (
            mock.patch.object(File, "cut", telling(File.cut)),
            mock.patch.object(File, "reserve", telling(File.reserve)),
            mock.patch.object(LogFile, "state", state),
        ):
            yield

    @property
    def nbytes(self) -> int:
        """Of all files now."""
        return sum(len(file.now) for file in _files(self._top))

    def is_ours(self, call: Call) -> bool:
        return call.path.startswith(self._prefix) or call.path == str(self.root)

    def see(self, call: Call, taken: int | None = None) -> None:
        """A call that will succeed, unless names are not there; ``taken``: of a write, so many bytes of it."""
        kind, path = call.name, call.path
        if kind == "write":
            if isinstance(file := self._find(path), _File):
                file.write(_Write(call.offset, call.data if taken is None else call.data[:taken]))
        elif kind == "truncate":
            if isinstance(file := self._find(path), _File):
                file.write(_Write(self._sizes.pop(path), None))
        elif kind == "sync":
            if isinstance(file := self._find(path), _File):
                file.sync()
        elif kind == "sync_folder":
            if isinstance(folder := self._find(path), _Folder):
                folder.sync()
        elif kind == "create":
            folder, name = self._above(path)
            if folder is None:
                return
            there = folder.now.get(name)
            if there is None:
                folder.change("", name, _File())
            elif isinstance(there, _File):
                there.write(_Write(0, None))
        elif kind == "make_folder":
            folder, name = self._above(path)
            if folder is not None and name not in folder.now:
                folder.change("", name, _Folder())
        elif kind in ("rename", "replace"):
            folder, name = self._above(path)
            if folder is not None and (node := folder.now.get(name)) is not None:
                assert os.path.dirname(path) == os.path.dirname(call.to), call
                folder.change(name, os.path.basename(call.to), node)
        elif kind in ("unlink", "remove_folder", "remove_tree"):
            folder, name = self._above(path)
            if folder is not None and (node := folder.now.get(name)) is not None:
                _empty(node)
                folder.change(name, "", node)

    def forget_writes(self, path: str) -> None:
        """A sync of the file failed; what it would have written is nobody's any more."""
        if isinstance(file := self._find(path), _File):
            for each in file.since:
                each.forgotten = each.data is not None  # the size is the file system's own

    def left_of(self, name: str, draw: random.Random) -> bytes:
        """What a power cut may leave of a file."""
        file = self._top.now[name]
        assert isinstance(file, _File)
        return file.after_cut(draw)

    def cut_power(self, draw: random.Random) -> None:
        """Makes the real folder what is left, all of which is safe then."""
        left = self._top.after_cut(draw)
        for entry in list(os.scandir(self.root)):
            if entry.is_dir():
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
        self._top = _Folder(now=_written(left, str(self.root), draw))
        self._top.sync()

    def check(self) -> None:
        """The real folder is what this one says that it is."""
        found, expected = _content(_read(self.root)), _content(self._top)
        assert found == expected, (
            f"the disk's model is wrong: {sorted(k for k in expected if found.get(k) != expected[k])}"
        )

    def _find(self, path: str) -> _File | _Folder | None:
        node: _File | _Folder | None = self._top
        for part in path[len(self._prefix) :].split(os.sep) if len(path) > len(self._prefix) else ():
            node = node.now.get(part) if isinstance(node, _Folder) else None
        return node

    def _above(self, path: str) -> tuple[_Folder | None, str]:
        folder = self._find(os.path.dirname(path))
        return (folder if isinstance(folder, _Folder) else None), os.path.basename(path)


def _empty(node: _File | _Folder) -> None:
    """Names go from the bottom up."""
    if isinstance(node, _Folder):
        for name, inner in list(node.now.items()):
            _empty(inner)
            node.change(name, "", inner)


def _written(names: dict[str, _File | _Folder], path: str, draw: random.Random) -> dict[str, _File | _Folder]:
    """Makes what is left, and returns it as synced."""
    safe: dict[str, _File | _Folder] = {}
    for name, node in names.items():
        place = f"{path}{os.sep}{name}"
        if isinstance(node, _Folder):
            os.mkdir(place)
            inner = _Folder(now=_written(node.after_cut(draw), place, draw))
            inner.sync()
            safe[name] = inner
            continue
        content = node.after_cut(draw)
        with open(place, "wb") as file:
            file.write(content)
        safe[name] = _File(now=bytearray(content), synced=content)
    return safe


def _read(path: Path) -> _Folder:
    folder = _Folder()
    for entry in sorted(path.iterdir()):
        if entry.is_dir():
            folder.now[entry.name] = _read(entry)
        else:
            content = entry.read_bytes()
            folder.now[entry.name] = _File(now=bytearray(content), synced=content)
    folder.sync()
    return folder


def _files(folder: _Folder) -> Iterator[_File]:
    for node in folder.now.values():
        if isinstance(node, _File):
            yield node
        else:
            yield from _files(node)


def _content(folder: _Folder, path: str = "") -> dict[str, bytes]:
    found = {}
    for name, node in folder.now.items():
        if isinstance(node, _File):
            found[f"{path}{name}"] = bytes(node.now)
        else:
            found |= {f"{path}{name}/": b"", **_content(node, f"{path}{name}/")}
    return found
