"""Keys: who gets in, who does not, and what that tells them."""

from __future__ import annotations

import errno
import json
import os
import stat

import pytest

from hybridindex.errors import AccessDeniedError, BuildError, InvalidInputError
from hybridindex.filesystem import watched_by
from hybridindex.service.auth import KeyFile, Keyring, Role
from tests.faults import FaultyDisk, of


@pytest.fixture
def file(tmp_path):
    return KeyFile(tmp_path / "keys.json")


def bearer(key: str) -> str:
    return f"Bearer {key}"


def test_a_key_opens_with_its_role(file):
    searcher, admin = file.add("web", "search"), file.add("ops", Role.ADMIN)
    ring = Keyring(file.path)
    assert ring.identify(bearer(searcher)) == ring.identify(f"bearer  {searcher}")
    assert ring.identify(bearer(searcher)).role is Role.SEARCH
    assert ring.identify(bearer(admin)).name == "ops"


@pytest.mark.parametrize(
    "shown", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic {key}", "{key}", "Bearer é\udcff"]
)
def test_whatever_is_wrong_the_words_are_the_same(file, shown):
    key = file.add("web", "search")
    with pytest.raises(AccessDeniedError) as refused:
        Keyring(file.path).identify(shown.format(key=key) if shown is not None else None)
    assert str(refused.value) == "a valid API key is needed: Authorization: Bearer KEY"


def test_the_file_holds_no_key_and_is_the_owners(file):
    key = file.add("web", "search")
    assert key.startswith("hix_")
    assert len(key) > 40
    text = file.path.read_text()
    assert key not in text
    assert key[4:] not in text
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert json.loads(text)["keys"][0]["name"] == "web"


def test_keys_come_and_go_without_a_restart(file):
    first = file.add("first", "search")
    ring = Keyring(file.path)
    second = file.add("second", "search")
    assert ring.identify(bearer(second)).name == "second"
    file.revoke("first")
    with pytest.raises(AccessDeniedError):
        ring.identify(bearer(first))
    assert ring.problem is None


def test_a_damaged_file_leaves_the_last_keys_in_force_and_says_so(file):
    key = file.add("web", "search")
    ring = Keyring(file.path)
    file.path.write_text("{")
    assert ring.identify(bearer(key)).name == "web"
    assert ring.problem is not None
    file.path.unlink()
    assert ring.identify(bearer(key)).name == "web"
    file.add("new", "search")
    with pytest.raises(AccessDeniedError):
        ring.identify(bearer(key))
    assert ring.problem is None


def test_a_disk_that_fails_for_a_moment_keeps_no_revoked_key(file):
    """The change counted as seen, so the key stayed in force until the file changed again."""
    key, _ = file.add("web", "search"), file.add("ops", "admin")
    ring = Keyring(file.path)
    file.revoke("web")
    with watched_by(FaultyDisk(counts=of("open"), allowed=0, number=errno.EMFILE)):
        ring.identify(bearer(key))
        assert ring.problem is not None
    with pytest.raises(AccessDeniedError):
        ring.identify(bearer(key))
    assert ring.problem is None


def test_a_name_is_taken_once(file):
    file.add("web", "search")
    with pytest.raises(InvalidInputError, match="'web', which has a key"):
        file.add("web", "admin")


@pytest.mark.parametrize("name", ["", "a b", "../x", "-", "x" * 65])
def test_names_are_plain(file, name):
    with pytest.raises(InvalidInputError, match=r"^name is"):
        file.add(name, "search")


def test_unknown_roles_and_names_are_refused(file):
    with pytest.raises(InvalidInputError, match=r"^role is 'root'"):
        file.add("web", "root")
    with pytest.raises(InvalidInputError, match=r"^name is 'nobody'"):
        file.revoke("nobody")


def test_a_ring_needs_a_key(file):
    with pytest.raises(InvalidInputError, match=r"^key_file"):
        Keyring(file.path)
    file.add("web", "search")
    file.revoke("web")
    with pytest.raises(InvalidInputError, match="holds no key"):
        Keyring(file.path)


def test_a_file_that_others_may_write_is_refused(file):
    file.add("web", "search")
    os.chmod(file.path, 0o620)
    with pytest.raises(InvalidInputError, match="may be written by others"):
        Keyring(file.path)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EACCES])
def test_a_disk_that_does_not_take_a_key_is_named(file, number):
    file.add("kept", "search")
    kept = file.read()

    for change in (lambda: file.add("other", "admin"), lambda: file.revoke(kept[0].name)):
        disk = FaultyDisk(counts=of("sync"), allowed=0, number=number)
        words = f"{file.path} cannot be written .*{os.strerror(number)}"
        with watched_by(disk), pytest.raises(BuildError, match=words):
            change()
    assert file.read() == kept
