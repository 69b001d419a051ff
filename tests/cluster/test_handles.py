"""Starting, finding and ending a cluster where something is in the way: files that are damaged, of a copy or of another
folder, a Ray that is another one's, an address where no node answers. Without Ray."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

import hybridindex.cluster as hc
from hybridindex.cluster import NodeOptions, local_ray, ray_actors
from hybridindex.cluster.cluster import Cluster
from hybridindex.cluster.keys import make_keys
from hybridindex.cluster.manager import Manager
from hybridindex.cluster.node_process import NodeProcess
from hybridindex.cluster.nodes import calls
from hybridindex.cluster.nodes.options import OPTIONS_FILE, read_options
from hybridindex.cluster.reach import kept_ca
from hybridindex.cluster.state import ClusterRequest, ClusterState, NodeEntry, hold_state, write_state
from hybridindex.errors import (
    BuildError,
    CorruptIndexError,
    InfeasiblePlanError,
    InvalidInputError,
    ServiceError,
    UnreachableError,
)
from tests.clustered import small_index

PLACE = {"NodeID": "a", "NodeManagerHostname": "host", "NodeManagerAddress": "10.0.0.7"}


@pytest.fixture
def web():
    """A server that is no node: (its address, what it answers)."""
    said = SimpleNamespace(body=b"<html>")

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-length", str(len(said.body)))
            self.end_headers()
            self.wfile.write(said.body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", said
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"nodes": 3, "dim": 4}', b'{"nodes": [{}], "dim": 4}'])
def test_an_address_where_no_node_answers_says_so(web, tmp_path, body):
    url, said = web
    said.body = body
    with (
        hc.connect(tmp_path, address=url) as cluster,
        pytest.raises(ServiceError, match=r"is not .*JSON|names no nodes"),
    ):
        cluster.router()


@pytest.mark.parametrize("address", ["http://", "http://h:99999", "http://[::1", "http://a b:1"])
def test_what_is_no_address_is_refused(tmp_path, address):
    with pytest.raises(InvalidInputError, match="url is"):
        hc.connect(tmp_path, address=address)


def test_an_answer_is_read_as_far_as_a_node_s_may_go(web, monkeypatch):
    url, said = web
    monkeypatch.setattr(calls, "_MOST_BYTES", 1000)
    said.body = b'{"nodes": [], "dim": 4}'.ljust(1000)
    assert calls.NodeCalls(url, None).nodes()["dim"] == 4
    said.body += b" "
    with pytest.raises(UnreachableError, match="more than 1000 bytes"):
        calls.NodeCalls(url, None).nodes()


@pytest.mark.parametrize("content", ["{", "[]", '{"tls_ca": null}'])
def test_options_that_are_damaged_are_named(tmp_path, content):
    assert kept_ca(tmp_path) is None
    (tmp_path / OPTIONS_FILE).write_text(content)
    for read in (kept_ca, read_options):
        with pytest.raises(CorruptIndexError, match=r"nodes\.json cannot be used"):
            read(tmp_path)


def test_paths_are_those_of_the_folder_where_a_cluster_was_started(tmp_path, monkeypatch):
    """Nodes, and later commands, run elsewhere."""
    monkeypatch.chdir(tmp_path)
    options = NodeOptions(
        memory_bytes=1, data=Path("data"), tls_cert=Path("a.pem"), tls_key=Path("a.key"), tls_ca=Path("ca.pem")
    )
    cluster = Cluster(tmp_path, "x", tmp_path, None)
    spec = cluster._spec("node-0", make_keys(tmp_path), options, PLACE, 1)
    assert spec.data == str(tmp_path / "data" / "x" / "node-0")
    assert (spec.tls_cert, spec.tls_ca) == (str(tmp_path / "a.pem"), str(tmp_path / "ca.pem"))
    options.keep(tmp_path)
    assert kept_ca(tmp_path) == str(tmp_path / "ca.pem")
    assert NodeOptions.read(tmp_path).tls_key == tmp_path / "a.key"


def test_the_cluster_of_an_index_is_not_ended_by_a_copy_of_its_directory(tmp_path, monkeypatch):
    def unreachable(*_):
        raise UnreachableError("no Ray")

    monkeypatch.setattr("hybridindex.cluster.cluster._attach", unreachable)
    folder = Path(f"/tmp/hix-{'0' * 11}a")
    index, copy = tmp_path / "idx", tmp_path / "copy"
    (index / "cluster").mkdir(parents=True)
    # As Ray's processes, it names its folder.
    head = subprocess.Popen(["sh", "-c", "sleep 600; :", str(folder)], start_new_session=True)
    try:
        own = {"address": "127.0.0.2:1", "token": "t", "pid": head.pid, "folder": str(folder)}
        (index / "cluster" / "ray.json").write_text(json.dumps({**own, "host": socket.gethostname()}))
        write_state(index / "cluster", ClusterState(cluster="x", index=str(index), request=ClusterRequest()))
        shutil.copytree(index, copy)
        with pytest.raises(InvalidInputError, match=r"belongs to the cluster of .*idx; name that index"):
            hc.stop(copy)
        assert head.poll() is None
        # One that was moved is its own.
        index.rename(tmp_path / "moved")
        hc.stop(tmp_path / "moved")
        head.wait(30)
    finally:
        head.kill()
        head.wait()


@pytest.mark.parametrize("what", ["interrupted", "no-disk"])
def test_a_ray_whose_start_is_interrupted_is_ended(tmp_path, monkeypatch, what):
    program, started = tmp_path / "program", []
    program.write_text("#!/bin/sh\nsleep 600; :\n")
    program.chmod(0o755)

    class Noted(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(local_ray, "subprocess", SimpleNamespace(Popen=Noted, DEVNULL=-3, STDOUT=-2))
    monkeypatch.setattr(local_ray.sys, "executable", str(program))
    if what == "no-disk":
        monkeypatch.setattr(local_ray, "_address_of", lambda *_: "127.0.0.2:1")
        monkeypatch.setattr(local_ray.filesystem, "replace_file", interrupt)
    else:
        monkeypatch.setattr(local_ray.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        local_ray.start_local(tmp_path)
    [head] = started
    try:
        assert head.poll() is not None
        assert not any(word.startswith("/tmp/hix-") and Path(word).exists() for word in head.args)
    finally:
        head.kill()
        head.wait()


def test_a_process_that_is_connected_to_another_ray_says_so(monkeypatch):
    """Nodes would be started there, and nobody would find them."""
    connected = SimpleNamespace(
        is_initialized=lambda: True, get_runtime_context=lambda: SimpleNamespace(gcs_address="127.0.0.2:6001")
    )
    monkeypatch.setattr(ray_actors, "load_ray", lambda: connected)
    for address in ("auto", "127.0.0.2:6001", "localhost:6001"):
        assert ray_actors.attach(address) is connected
    with pytest.raises(ServiceError, match=r"connected to the Ray at 127\.0\.0\.2:6001, and the cluster is at .*:6002"):
        ray_actors.attach("127.0.0.2:6002")


def test_a_manager_that_was_started_again_waits_until_its_index_can_be_read(tmp_path, monkeypatch):
    index, away, state = tmp_path / "idx", tmp_path / "away", tmp_path / "state"
    small_index(index, n=300, nlist=4).close()
    index.rename(away)
    tries = []

    def make():
        return Manager(state, cluster="x", index=index, request=ClusterRequest(), key=None)

    def returns(_seconds):
        tries.append(1)
        if len(tries) == 2:
            away.rename(index)

    with pytest.raises(Exception, match="idx"):
        make()
    hold_state(state, timeout_s=0).close()  # nobody has it
    monkeypatch.setattr(ray_actors, "time", SimpleNamespace(sleep=returns))
    manager = ray_actors.until_made(make)
    manager.close()
    assert len(tries) == 2


def test_a_node_that_was_started_and_got_no_lists_is_named(tmp_path, monkeypatch):
    status = {"generation": 1, "nodes": [{"name": "node-0", "url": "http://h:1", "memory_bytes": 1, "drains": True}]}
    manager = SimpleNamespace(
        status=SimpleNamespace(remote=lambda: status),
        set_nodes=SimpleNamespace(remote=lambda entries: None),
        repartition=SimpleNamespace(remote=lambda anew: None),
    )

    def refuse(*_):
        raise BuildError("another change goes on")

    cluster = Cluster(tmp_path, "x", tmp_path, SimpleNamespace(nodes=lambda: [{**PLACE, "Alive": True}]))
    make_keys(tmp_path)
    NodeOptions(memory_bytes=1, data=tmp_path).keep(tmp_path)
    assert (tmp_path / OPTIONS_FILE).stat().st_mode & 0o077 == 0  # a store may be named with its password
    monkeypatch.setattr(Cluster, "_manager", lambda _: manager)
    monkeypatch.setattr(Cluster, "_call", lambda _, answer, _limit_s: answer)
    monkeypatch.setattr(
        Cluster, "_start_nodes", lambda *_: [NodeEntry(name="node-1", url="http://h:2", memory_bytes=1)]
    )
    monkeypatch.setattr(Cluster, "_change", refuse)
    with pytest.raises(BuildError, match=r"goes on; node-1 was started, and takes lists with: .* repartition"):
        cluster.add_node()


@pytest.mark.parametrize("kept", ["99999", "-1", "x", ""])
def test_a_port_that_is_none_is_not_taken(tmp_path, kept):
    (tmp_path / "port").write_text(kept)
    node = object.__new__(NodeProcess)
    node._folder, node._spec = tmp_path, SimpleNamespace(host="127.0.0.1")
    assert 0 < node._choose_port() < 65_536


def test_a_node_that_cannot_take_a_plan_is_named_and_others_take_it(tmp_path, monkeypatch):
    answers = {
        "node-0": ServiceError("another machine"),
        "node-1": {"plan_id": 7, "lists_to_move": 3, "bytes_to_move": 4096, "unplaced_lists": 0},
        "node-2": {"plan_id": 7, "lists_to_move": 0, "bytes_to_move": 0, "unplaced_lists": 1},
    }
    asked = []

    def apply_on(_, name, choice, **options):
        asked.append((name, choice, options))
        if isinstance(answers[name], Exception):
            raise answers[name]
        return answers[name]

    cluster = Cluster(tmp_path, "x", tmp_path, None)
    NodeOptions(memory_bytes=1, data=tmp_path, serve=("--store", "postgresql://h/d")).keep(tmp_path)
    monkeypatch.setattr(Cluster, "status", lambda _: {"nodes": [{"name": name, "drains": False} for name in answers]})
    monkeypatch.setattr(Cluster, "_apply_on", apply_on)
    done = cluster.apply_plan(force=True)["nodes"]
    assert [node["problem"] for node in done] == ["another machine", None, None]
    assert [node["moved_lists"] for node in done] == [None, 3, 0]
    assert [node["unplaced_lists"] for node in done] == [None, 0, 1]
    # The plan that the first one took, whatever is the latest then.
    assert [choice for _, choice, _ in asked] == ["latest", "latest", "7"]
    assert asked[0][2] == {"force": True, "bandwidth_share": None}
    answers |= dict.fromkeys(("node-1", "node-2"), UnreachableError("away"))
    with pytest.raises(ServiceError, match="another machine"):
        cluster.apply_plan()
    asked.clear()
    answers["node-1"] = InfeasiblePlanError("misses its SLO")
    with pytest.raises(InfeasiblePlanError):
        cluster.apply_plan()
    assert [name for name, *_ in asked] == ["node-0", "node-1"]
    with pytest.raises(InvalidInputError, match="bandwidth_share is 2"):
        cluster.apply_plan(bandwidth_share=2)
