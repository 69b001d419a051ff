"""Every error that hybridindex raises on purpose. "Infeasible" is a verdict of a plan, never an exception."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from os import PathLike

__all__ = [
    "FULL",
    "AccessDeniedError",
    "BuildError",
    "BusyWritingError",
    "ClaimedError",
    "CorruptIndexError",
    "DamagedListsError",
    "DeadlineExceededError",
    "DeviceBusyError",
    "DeviceError",
    "DeviceNotFoundError",
    "DeviceSlowError",
    "DiskFullError",
    "DocumentStoreError",
    "DuplicateIdError",
    "EmbeddingError",
    "FileError",
    "ForkedError",
    "GenerationError",
    "HybridIndexError",
    "IncompleteAnswerError",
    "IndexExistsError",
    "IndexFormatError",
    "InfeasiblePlanError",
    "InvalidInputError",
    "LLMServerError",
    "LeftBehindError",
    "MissingDependencyError",
    "MissingFileError",
    "NoDocumentsError",
    "NoEmbedderError",
    "NotHeldError",
    "NotWritableError",
    "OutOfBudgetError",
    "OverloadedError",
    "PlanConflictError",
    "PlanningError",
    "ProfileError",
    "ProfileMismatchError",
    "RefreshError",
    "ReloadError",
    "RouterClosedError",
    "RouterError",
    "ServiceError",
    "StoreError",
    "StoreLockedError",
    "StoreVersionError",
    "SupersededError",
    "TraceError",
    "UnknownSessionError",
    "UnreachableError",
    "UnreadableIndexError",
    "UnsupportedIndexError",
    "cannot_read",
    "cannot_write",
    "file_error",
    "how_to_install",
    "io_cure",
    "without_path",
]

#: No room: of the disk, of a quota, of a limit of file sizes.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CURES = {
    errno.EACCES: "give this user the right to it, and to enter the folders above it",
    errno.EPERM: "give this user the right to it",
    errno.EROFS: "its file system is mounted read-only",
    errno.EIO: "its disk, or the way to it, fails: see the kernel's log, and go on elsewhere",
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room within the quota",
    errno.EFBIG: "raise the limit of file sizes",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "this machine has too many files open",
    errno.ENOMEM: "there is no memory, or too much of it is mapped (vm.max_map_count)",
    errno.ENOENT: "give the path of something that is there",
    errno.EEXIST: "remove what is there, or give another path",
    errno.ENOTDIR: "what stands above it in the path must be a folder",
    errno.EISDIR: "give the path of a file",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.ELOOP: "its links lead in a circle",
    errno.EBUSY: "something else uses it: try again later",
    errno.ENOSYS: "its file system has no file locks: use a local one",
    errno.ENOLCK: "its file system has no file locks: use a local one",
}
#: What a call does to a file; the others write.
_DONE = {
    "open": "opened",
    "create": "made",
    "read": "read",
    "parse": "read",
    "map": "mapped",
    "stat": "looked at",
    "list_folder": "listed",
    "lock": "locked",
    "sync": "synced",
    "sync_folder": "synced",
    "make_folder": "made",
    "link": "linked",
    "symlink": "made",
    "rename": "renamed",
    "replace": "renamed",
    "unlink": "removed",
    "remove_folder": "removed",
    "remove_tree": "removed",
}


class HybridIndexError(Exception):
    """Root of all deliberate errors."""


class FileError(HybridIndexError, OSError):
    """The operating system refuses a call on a file or folder. The message names it, the reason and a cure; ``errno``,
    ``strerror`` and ``filename`` are those of the system."""

    def __str__(self) -> str:
        return str(self.args[0])


class MissingFileError(FileError, FileNotFoundError):
    """There is no such file or folder."""


class InvalidInputError(HybridIndexError, ValueError):
    """An argument is wrong. The message names the field, its value and what would be right."""


class PlanConflictError(InvalidInputError):
    """What is asked of the next plan contradicts the plan in force, or itself beside one. The message names both."""


class InfeasiblePlanError(InvalidInputError):
    """A plan that cannot meet its SLO would be applied, and nobody forced it. Nothing was stored or moved."""


class IndexExistsError(InvalidInputError):
    """An index stands where a new one was to be written, and nobody asked to replace it. The message describes it."""


class DuplicateIdError(InvalidInputError):
    """The same id was given to two vectors."""


class IndexFormatError(HybridIndexError):
    """An index directory or file cannot be used."""


class CorruptIndexError(IndexFormatError):
    """Stored bytes differ from their checksum, or a file is truncated."""


class DamagedListsError(CorruptIndexError):
    """A search needs lists whose bytes turned out to be damaged while they are served. Others are answered."""

    def __init__(self, message: str, *, lists: Sequence[int] = ()) -> None:
        """``lists``: their ids; none where they are not known here."""
        super().__init__(message)
        self.lists = tuple(lists)


class IncompleteAnswerError(HybridIndexError):
    """Nodes that hold lists of a search are away or late, and less was scanned than the search allows."""

    def __init__(self, message: str, *, coverage: float = 0.0) -> None:
        """``coverage``: fraction of the work that was done, of the query with the least."""
        super().__init__(message)
        self.coverage = coverage


class NotHeldError(HybridIndexError):
    """A search, or a peer, needs lists that this share of an index does not hold. Others are answered."""

    def __init__(self, message: str, *, lists: Sequence[int] = ()) -> None:
        """``lists``: their ids; none where they are not known here."""
        super().__init__(message)
        self.lists = tuple(lists)


class UnreadableIndexError(IndexFormatError):
    """A file of an index is there and cannot be read: no permission, or the disk reports an error. What it holds may be
    intact."""


class UnsupportedIndexError(IndexFormatError):
    """A foreign file, a newer format version, or an index kind or metric that is not served."""


class BuildError(HybridIndexError):
    """A build stopped before its generation was committed; the previous generation is intact."""


class ClaimedError(BuildError):
    """Another process has the right to write. Nothing was changed."""


class SupersededError(BuildError):
    """The generation was compacted into another one, which takes the change. Nothing was changed."""


class LeftBehindError(BuildError):
    """Another process replaced ``generation``, a folder, before all its changes were read here: what is open would
    answer with rows that are gone. Open the index again; a daemon does so by itself."""

    def __init__(self, generation: PathLike[str]) -> None:
        folder, name = os.path.split(generation)
        super().__init__(
            f"{name} of {folder} was replaced before all its changes were read, and would answer with rows that are "
            "gone; open the index again"
        )


class BusyWritingError(BuildError):
    """Rows come faster than lists can be written anew. Nothing was changed: the change can be sent again after
    :attr:`retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DiskFullError(BuildError):
    """The file system is full."""


class NotWritableError(BuildError):
    """A file or directory cannot be written."""


class StoreError(HybridIndexError):
    """The control store cannot be used."""


class StoreLockedError(StoreError):
    """Another process held the control store past the busy timeout."""


class StoreVersionError(StoreError):
    """The control store was written by a newer version of hybridindex."""


class ProfileError(HybridIndexError):
    """A profile is missing, incomplete or too small."""


class ProfileMismatchError(ProfileError):
    """A profile was measured on another index or another machine."""


class DeviceError(HybridIndexError):
    """A device cannot be used."""


class DeviceBusyError(DeviceError):
    """The device exists and cannot be used now: no memory for a context, or another process holds it exclusively."""


class DeviceNotFoundError(DeviceError):
    """The named device does not exist here."""


class DeviceSlowError(DeviceError):
    """Internal to routing: a device takes clearly longer than the host would. Its lists are intact."""


class OutOfBudgetError(DeviceError):
    """Internal to placement: pages or scratch would exceed the byte budget of a device."""


class ForkedError(HybridIndexError):
    """What owns threads was carried across a fork, into a process that has none of them. Open it after the fork."""


class MissingDependencyError(HybridIndexError, ImportError):
    """An optional package is not installed; the message names the extra that contains it."""


class _HTTPStatusError(HybridIndexError):
    def __init__(self, message: str, *, status: int | None = None) -> None:
        """``status``: of the HTTP answer that refused; 0 where nothing accepted the connection."""
        super().__init__(message)
        self.status = status


class LLMServerError(_HTTPStatusError):
    """An LLM cannot be measured: its server cannot be reached, answers wrongly or too slowly, or its engine cannot run.
    The message names the address and the answer."""


class RouterError(HybridIndexError):
    """The router cannot serve the request."""


class RouterClosedError(RouterError):
    """The router or session was closed."""


class RefreshError(RouterError):
    """The plan cannot be updated now: another update is running, or the update's old plan serves no longer."""


class PlanningError(RefreshError):
    """The process that makes plans cannot be started, ended too early, or took too long. What serves goes on."""


class DocumentStoreError(HybridIndexError):
    """A document store is missing, foreign, damaged, or was written for another index."""


class NoDocumentsError(DocumentStoreError):
    """The index has no documents beside its vectors, so that it takes vectors alone."""


class NoEmbedderError(HybridIndexError):
    """Texts cannot be embedded here: the embedder of the documents is not known, not installed, or has no address."""


class GenerationError(_HTTPStatusError):
    """An LLM server cannot be reached, refused the request, or sent an answer that cannot be read."""


class EmbeddingError(_HTTPStatusError):
    """A server of embeddings cannot be reached, refused the request, or sent an answer that cannot be read."""

    def __init__(self, message: str, *, status: int | None = None, retry_after_s: float = 0.0) -> None:
        """``retry_after_s``: what the server asked for; 0 where it did not."""
        super().__init__(message, status=status)
        self.retry_after_s = retry_after_s


class TraceError(HybridIndexError):
    """A trace cannot be read, or has other steps than the pipeline that replays it."""


class ServiceError(HybridIndexError):
    """A daemon cannot serve the request, or cannot be reached."""


class ReloadError(ServiceError):
    """Another generation of the index could not take the place of the one that serves, which goes on."""


class AccessDeniedError(ServiceError):
    """There is no API key, it is wrong or revoked, or its role does not allow the call."""


class DeadlineExceededError(ServiceError):
    """The deadline passed before the search started."""


class OverloadedError(ServiceError):
    """The queue is full, or the daemon drains. Nothing was done: the request can be sent again after a while."""

    def __init__(self, message: str, *, retry_after_s: float, own_share: bool = False) -> None:
        """``own_share``: only this client's part of the queue is full."""
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.own_share = own_share


class UnknownSessionError(ServiceError):
    """The session was never opened, is closed, has expired, or is another client's."""


class UnreachableError(ServiceError):
    """Nothing answers at the daemon's address."""


def how_to_install(*extras: str) -> str:
    """``pip install`` with what extras bring, by the packages' own names: no package index has hybridindex."""
    import re
    from importlib.metadata import PackageNotFoundError, requires

    try:
        needed = requires("hybridindex") or []
    except PackageNotFoundError:
        return f"in the source of hybridindex: pip install '.[{','.join(extras)}]'"
    of_extras = re.compile(rf"extra == .({'|'.join(extras)}).$")
    found = [entry.partition(";")[0].strip() for entry in needed if of_extras.search(entry)]
    return "pip install " + " ".join(f"'{package}'" for package in found)


def without_path(text: str, path: str | PathLike[str]) -> str:
    """``text`` for clients, who are told no paths: INDEX stands for ``path``. A name alone may be any word: it stays,
    but for where it begins a path."""
    import re

    name = os.fspath(path)
    end = r"(?![\w-]|\.\w)" if os.sep in name else f"(?={os.sep})"
    return re.sub(rf"(?<![\w./-]){re.escape(name)}{end}", "INDEX", text)


def io_cure(error: OSError) -> str:
    """What helps against an error of the operating system."""
    return _CURES.get(error.errno or 0, "see what the operating system says of it")


def file_error(error: OSError, call: str, path: str | PathLike[str]) -> FileError:
    """What to raise where a call on ``path`` failed; ``call``: as :class:`hybridindex.filesystem.Call` names it."""
    kind = MissingFileError if isinstance(error, FileNotFoundError) else FileError
    done = _DONE.get(call, "written")
    made = kind(f"{os.fspath(path)} cannot be {done}: {error.strerror or error}; {io_cure(error)}")
    made.errno, made.strerror, made.filename = error.errno, error.strerror, os.fspath(path)
    return made


def cannot_read(error: OSError, field: str, path: str | PathLike[str]) -> InvalidInputError:
    """What to raise where a file that was given as ``field`` cannot be read."""
    return InvalidInputError(f"{field} {os.fspath(path)!r} cannot be read: {error.strerror or error}; {io_cure(error)}")


def cannot_write(error: OSError, path: str | PathLike[str], kept: str) -> BuildError:
    """What to raise where writing ``path`` failed; ``kept`` says what is there now."""
    kind = DiskFullError if error.errno in FULL else NotWritableError
    why = error.strerror or str(error)
    if error.filename not in (None, os.fspath(path)):
        why = f"{why}: {error.filename}"
    return kind(f"{path} cannot be written ({why}): {io_cure(error)}; {kept}")
