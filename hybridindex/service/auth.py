"""API keys: a file of hashed keys with roles, and the caller of a request.

A key is 256 random bits, so its plain SHA-256 cannot be reversed. The slow hashes that passwords need would cost every
request milliseconds and protect nothing more. The file is replaced as a whole and read again when it changed: keys come
and go without a restart. ``middleware.py`` says what a role may do.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from filelock import Timeout

from hybridindex import filesystem
from hybridindex.errors import AccessDeniedError, BuildError, FileError, InvalidInputError, cannot_read, cannot_write
from hybridindex.processes import lock_file

__all__ = ["Caller", "KeyFile", "Keyring", "Role", "StoredKey", "new_key"]

_log = logging.getLogger(__name__)

_PREFIX = "hix_"
_VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Role(StrEnum):
    """What a key allows. Each may do what those before it may."""

    SEARCH = "search"
    #: Also add, replace and delete rows.
    WRITE = "write"
    ADMIN = "admin"

    def includes(self, other: Role) -> bool:
        """Whether a key with this role may do what ``other`` may."""
        roles = list(Role)
        return roles.index(self) >= roles.index(other)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request: a key's name, or an address where no keys are needed."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKey:
    """One entry of the key file. The key itself is not stored."""

    name: str
    role: Role
    #: Hexadecimal SHA-256 of the key.
    sha256: str
    #: ISO 8601, UTC.
    created_at: str


def _utc_now() -> datetime:
    return datetime.now(UTC)


def new_key() -> str:
    """A random one."""
    return _PREFIX + secrets.token_urlsafe(32)


class KeyFile:
    """The file for commands. A lock orders writers of several processes; readers never see half a file."""

    def __init__(self, path: Path, clock: Callable[[], datetime] = _utc_now) -> None:
        self.path = path
        self._clock = clock

    def add(self, name: str, role: Role | str) -> str:
        """Makes a key, stores its hash and returns the key, which cannot be read later.

        Raises:
            InvalidInputError: the name is taken or no name, or there is no such role.
        """
        if not _NAME.fullmatch(name):
            raise InvalidInputError(f"name is {name!r}; expected up to 64 letters, digits, dots, dashes or underscores")
        try:
            role = Role(role)
        except ValueError:
            raise InvalidInputError(f"role is {role!r}; expected {', '.join(Role)}") from None
        key = new_key()
        self._add(name, role, key)
        return key

    def add_known(self, name: str, role: Role, key: str) -> None:
        """Stores the hash of a key that was made elsewhere, with :func:`new_key`.

        Raises:
            InvalidInputError: the name is taken.
        """
        self._add(name, role, key)

    def _add(self, name: str, role: Role, key: str) -> None:
        made = StoredKey(
            name=name, role=role, sha256=_digest(key), created_at=self._clock().isoformat(timespec="seconds")
        )
        with self._writing():
            keys = self._read_or_none()
            if any(k.name == name for k in keys):
                raise InvalidInputError(f"name is {name!r}, which has a key; revoke it first or take another name")
            self._write((*keys, made))

    def revoke(self, name: str) -> None:
        """Removes a key from the file.

        Raises:
            InvalidInputError: nobody has that name.
        """
        with self._writing():
            keys = self._read_or_none()
            kept = tuple(k for k in keys if k.name != name)
            if len(kept) == len(keys):
                raise InvalidInputError(
                    f"name is {name!r}; expected one of {', '.join(k.name for k in keys) or 'none'}"
                )
            self._write(kept)

    def read(self) -> tuple[StoredKey, ...]:
        """All keys.

        Raises:
            InvalidInputError: missing, damaged, or others may write it.
        """
        try:
            shared = filesystem.others_may_write(self.path)
            data = json.loads(filesystem.read_bytes(self.path))
            if data["version"] != _VERSION:
                raise InvalidInputError(f"key_file {self.path} has version {data['version']}; {_VERSION} is known")
            keys = tuple(_stored(entry) for entry in data["keys"])
        except InvalidInputError:
            raise
        except FileError as error:
            raise cannot_read(error, "key_file", self.path) from None
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInputError(
                f"key_file {self.path} cannot be used ({error}); expected what keys add made"
            ) from None
        if shared:
            raise InvalidInputError(f"key_file {self.path} may be written by others; expected mode 600")
        return keys

    def _read_or_none(self) -> tuple[StoredKey, ...]:
        return self.read() if filesystem.exists(self.path) else ()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Holds the lock."""
        lock = self.path.with_name(self.path.name + ".lock")
        try:
            filesystem.make_folder(self.path.parent, parents=True, exist_ok=True)
            with lock_file(lock, timeout_s=10):
                yield
        except Timeout:
            raise BuildError(f"key_file {self.path}: another process holds {lock}; try again") from None
        except FileError as error:
            raise cannot_write(error, self.path, "hybridindex keys list says which keys are in it") from error

    def _write(self, keys: tuple[StoredKey, ...]) -> None:
        text = json.dumps({"version": _VERSION, "keys": [asdict(k) for k in keys]}, indent=1)
        # The key is shown next: a power cut must not lose it.
        filesystem.replace_file(self.path, text + "\n", permissions=0o600)


def _stored(entry: Any) -> StoredKey:
    key = StoredKey(**{**entry, "role": Role(entry["role"])})
    if not all(isinstance(v, str) for v in (key.name, key.sha256, key.created_at)) or len(key.sha256) != 64:
        raise ValueError(f"key {entry!r} is damaged")
    return key


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _callers(keys: tuple[StoredKey, ...]) -> dict[str, Caller]:
    """Callers by the hash of their key."""
    return {key.sha256: Caller(name=key.name, role=key.role) for key in keys}


class Keyring:
    """The keys of a running daemon, read again when the file changed. One thread at a time.

    If the file can no longer be read, the last good keys stay in force; :attr:`problem` and the log say so.
    """

    def __init__(self, path: Path) -> None:
        """Raises InvalidInputError where the file cannot be used, or holds no key: nobody could get in."""
        self._file = KeyFile(path)
        self._keys = self._file.read()
        if not self._keys:
            raise InvalidInputError(f"key_file {path} holds no key; expected one at least (hybridindex keys add)")
        self._callers = _callers(self._keys)
        self._stamp = self._look()
        #: What is wrong with the file now, or None.
        self.problem: str | None = None

    def _look(self) -> tuple[int, int, int, int] | None:
        try:
            found = filesystem.stat(self._file.path)
        except FileError:
            return None
        # ctime tells a change of mode: a file that others may write is refused.
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino

    def _refresh(self) -> None:
        stamp = self._look()
        if stamp == self._stamp:
            return
        try:
            self._keys = self._file.read()
        except InvalidInputError as error:
            # Read again at the next request: a key that was revoked must not stay in force for a disk's moment.
            if self.problem is None:
                self.problem = "the key file cannot be read; the keys read before stay in force"
                _log.error("%s: %s", self.problem, error)
        else:
            self._stamp, self.problem = stamp, None
            self._callers = _callers(self._keys)
            _log.info("key file read again: %d keys", len(self._keys))

    def identify(self, authorization: str | None) -> Caller:
        """The caller with ``Authorization: Bearer KEY``.

        Raises:
            AccessDeniedError: the same words whatever is wrong.
        """
        self._refresh()
        found = self.recall(authorization)
        if found is None:
            raise AccessDeniedError("a valid API key is needed: Authorization: Bearer KEY")
        return found

    def recall(self, authorization: str | None) -> Caller | None:
        """As :meth:`identify`, from the keys read last; None: not valid. Enough to refuse a search."""
        scheme, _, key = (authorization or "").partition(" ")
        # Looked up by hash: nobody can choose a key whose hash is near another's, so timing tells nothing.
        found = self._callers.get(_digest(key.strip()))
        return found if scheme.lower() == "bearer" else None
