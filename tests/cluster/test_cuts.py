"""Machines whose network is cut: packets that arrive nowhere, on a real network of namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.namespaces import allowed, begin


@pytest.mark.skipif(not allowed(), reason="no network of our own: needs unshare, ip, and a kernel that lets us")
def test_who_sees_most_nodes_goes_on_and_who_is_alone_says_so(tmp_path):
    words = begin(sys.executable, "-m", "tests.cluster.cut_run", str(tmp_path))
    root = Path(__file__).parents[2]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert all(0 < share < 1 for share in said["alone"]["coverage"])
    assert said["alone"]["search"].startswith("IncompleteAnswerError: the nodes that answer scanned 0.")
    # The other two would write; this one alone is not most of them.
    assert said["alone"]["write"].startswith(("UnreachableError: no connection", "OverloadedError: no node"))
