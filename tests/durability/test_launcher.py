"""What the tests start does not outlive them."""

from __future__ import annotations

from tests.durability.launcher import Launcher


def test_children_end_with_their_launcher(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text("import signal\nprint('here', flush=True)\nsignal.pause()\n")
    with Launcher(tmp_path) as launcher:
        child = launcher.start(script)
        child.wait_for("here")
    assert not child.alive
