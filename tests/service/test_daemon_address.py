"""Where a daemon is found: one per index, and nothing that a dead one left is in the way."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys

import pytest

from hybridindex.errors import ServiceError
from hybridindex.service.daemon_address import DaemonAddress, bind_tcp, bind_unix, find_daemon


def test_a_place_is_held_by_one_and_found_by_all(tmp_path):
    assert find_daemon(tmp_path) is None
    address = DaemonAddress(tmp_path)
    address.announce(("unix:/run/x", "http://127.0.0.1:1"))
    # File locks are per process: ask from another one.
    code = (
        "import sys; from pathlib import Path\n"
        "from hybridindex.service.daemon_address import DaemonAddress, find_daemon\n"
        "found = find_daemon(Path(sys.argv[1])); print(found.pid, *found.urls)\n"
        "DaemonAddress(Path(sys.argv[1]))"
    )
    other = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert other.stdout.split() == [str(os.getpid()), "unix:/run/x", "http://127.0.0.1:1"]
    assert other.returncode != 0
    assert f"another daemon (pid {os.getpid()}) serves" in other.stderr
    address.leave()
    address.leave()
    assert find_daemon(tmp_path) is None
    DaemonAddress(tmp_path).leave()


def test_a_killed_daemons_file_means_nothing(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from hybridindex.service.daemon_address import DaemonAddress\n"
        "p = DaemonAddress(Path(sys.argv[1])); p.announce(('unix:/x',)); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert (tmp_path / "daemon.json").exists()
    assert find_daemon(tmp_path) is None
    DaemonAddress(tmp_path).leave()


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path):
    path = tmp_path / "s"
    first = bind_unix(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ServiceError, match="listened on by another process"):
        bind_unix(path)
    first.close()
    assert path.exists()
    bind_unix(path).close()


def test_what_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ServiceError, match="is not a socket"):
        bind_unix(path)
    assert path.read_text() == "data"


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "target").write_text("data")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(ServiceError, match="is not a socket"):
        bind_unix(tmp_path / "link")


def test_a_taken_port_is_named():
    bound = bind_tcp("127.0.0.1", 0)
    port = bound.getsockname()[1]
    with pytest.raises(ServiceError, match=f"port {port} cannot be listened on"):
        bind_tcp("127.0.0.1", port)
    bound.close()
    assert isinstance(bound, socket.socket)
