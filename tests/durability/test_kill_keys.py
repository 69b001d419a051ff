"""A change of keys that is killed: the file holds the old keys or the new ones, and a running daemon goes on."""

from __future__ import annotations

import signal

import pytest

from hybridindex.errors import AccessDeniedError
from hybridindex.service.auth import KeyFile, Keyring
from tests.durability.points import Point

#: (point, whether the change is in force afterwards)
POINTS = [
    (Point(name="hash not yet written", target="os:open", when="after", having=".new"), False),
    (Point(name="written, not synced", target="os:fsync", when="before"), False),
    (Point(name="synced, not in place", target="os:replace", when="before", having="keys.json"), False),
    (Point(name="in place", target="os:replace", when="after", having="keys.json"), True),
]


@pytest.mark.parametrize(("point", "changed"), POINTS, ids=lambda v: v.name if isinstance(v, Point) else "")
@pytest.mark.parametrize("action", ["add", "revoke"])
def test_a_killed_change_of_keys(launcher, tmp_path, action, point, changed):
    path = tmp_path / "keys.json"
    keys = KeyFile(path)
    kept, going = keys.add("kept", "admin"), keys.add("going", "search")
    running = Keyring(path)
    child = launcher.start("keys", action, path, "coming" if action == "add" else "going", at=point)
    assert child.wait() == -signal.SIGKILL, child.log
    names = {"kept", "going"}
    if changed:
        names = names | {"coming"} if action == "add" else names - {"going"}
    for ring in (running, Keyring(path)):
        assert {k.name for k in keys.read()} == names
        assert ring.identify(f"Bearer {kept}").name == "kept"
        if "going" in names:
            assert ring.identify(f"Bearer {going}").name == "going"
        else:
            with pytest.raises(AccessDeniedError):
                ring.identify(f"Bearer {going}")
        assert ring.problem is None
    assert path.stat().st_mode & 0o777 == 0o600
    # The next change is made, and leaves nothing of the one that died.
    keys.add("next", "search")
    assert {e.name for e in tmp_path.iterdir()} <= {"keys.json", "keys.json.lock"}
