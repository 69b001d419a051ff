"""The process: real sockets, real signals, a real second process that is killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from contextlib import contextmanager

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.client import Client, RetryPolicy
from hybridindex.errors import AccessDeniedError, InvalidInputError, OverloadedError, ServiceError, UnreachableError
from hybridindex.router import HealthPolicy
from hybridindex.service.auth import KeyFile
from hybridindex.service.config import ServiceConfig
from hybridindex.service.daemon import Daemon, serve
from hybridindex.service.daemon_address import bind_tcp, bind_unix, find_daemon
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.native_scanner import NativePageScanner
from tests.clustered import clustered
from tests.durability.launcher import PLANS_SOON
from tests.service.conftest import assert_same, held_engine
from tests.stuck import Stuck, ended

ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}


@contextmanager
def daemon(*words):
    """``hybridindex serve … --json`` as a process; gives it and its addresses."""
    command = [sys.executable, "-m", "hybridindex", "serve", *map(str, words), "--json", "--log-format", "json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, json.loads(line)["urls"]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_the_whole_life_of_a_daemon(launcher, index_path, tmp_path, queries):
    with hx.open(index_path) as index, index.router() as router:
        expected = router.search(queries, 5, 6)
    uds = tmp_path / "s"
    words = (index_path, "--device", "cpu", "--uds", uds, "--port", 0, *PLANS_SOON)
    with daemon(*words) as (process, urls):
        assert urls[0] == f"unix:{uds}"
        assert find_daemon(index_path).pid == process.pid
        for url in urls:
            with Client(url, retry=RetryPolicy(attempts=20)) as client:
                assert_same(client.search(queries, 5, 6), expected)
                with client.session() as session:
                    session.lookahead(queries)
                    assert_same(session.search(queries, 5, 6), expected)
                applied = client.repartition(apply=True, coverage=0.5)["plan_id"]
        # A second one for the same index is refused.
        second = launcher.start("serve", index_path, "--port", 0)
        assert second.wait() == 8
        assert f"another daemon (pid {process.pid})" in " ".join(second.log.split())
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=300)
        assert process.returncode == 0, log
        lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        assert lines[-1]["message"] == "stopped"
        searches = [line for line in lines if line.get("route") == "/v1/search"]
        assert len(searches) == 2
        assert len({line["request_id"] for line in searches}) == 2
    assert not uds.exists()
    assert find_daemon(index_path) is None
    # Killed, it leaves its socket and file; the next one starts all the same, with the plan that was applied last.
    with launcher.daemon(*words):
        pass
    assert uds.exists()
    with launcher.daemon(*words) as (_, urls), Client(urls[1], retry=RetryPolicy(attempts=20)) as client:
        assert client.status()["plan_id"] == applied
        assert_same(client.search(queries, 5, 6), expected)


def run_daemon(service, sockets, play, **options):
    """Runs a daemon on this thread, and ``play()`` on another; returns what that returned or raises what it raised."""
    outcome: list[object] = []

    def run_play() -> None:
        try:
            outcome.append(play())
        except BaseException as error:  # noqa: BLE001 - raised again on the test's thread
            outcome.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    player = threading.Thread(target=run_play)

    async def main() -> None:
        running = Daemon(service, options.get("keyring"), sockets)
        player.start()
        await running.run()

    asyncio.run(main())
    player.join(300)
    assert not player.is_alive()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


@pytest.mark.parametrize("drained", [False, True], ids=["running", "draining"])
def test_sigterm_answers_what_was_admitted_and_refuses_the_rest(make_service, tmp_path, queries, monkeypatch, drained):
    """Also after ``hybridindex drain``, as a supervisor sends it: it is the first signal."""
    service = make_service(warm=False)
    signalled, stop = threading.Event(), Daemon.stop

    def noticed(self) -> None:
        stop(self)
        signalled.set()

    monkeypatch.setattr(Daemon, "stop", noticed)
    expected = service.router.search(queries, 5)
    sockets = [bind_unix(tmp_path / "s"), bind_tcp("127.0.0.1", 0)]
    url = f"http://127.0.0.1:{sockets[1].getsockname()[1]}"

    def play():
        found: list[object] = []
        with Client(url, retry=RetryPolicy(attempts=1)) as client, Client(f"unix:{tmp_path / 's'}") as other:
            client.status()
            searcher = threading.Thread(target=lambda: found.append(other.search(queries, 5)))
            with held_engine(service.router, queries) as gate:
                searcher.start()
                while service.admission.n_in_flight == 0:
                    pass
                if drained:
                    client.drain()
                    signalled.clear()
                os.kill(os.getpid(), signal.SIGTERM)
                assert signalled.wait(300)
                assert service.admission.draining
                with pytest.raises((ServiceError, UnreachableError)):
                    client.search(queries, 5)
                assert not found
                gate.set()
            searcher.join(300)
        return found

    (found,) = run_daemon(service, sockets, play)
    assert_same(found, expected)


def test_a_second_signal_ends_the_wait(make_service, queries):
    service = make_service(warm=False, drain_timeout_s=600)
    sockets = [bind_tcp("127.0.0.1", 0)]
    url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"

    def play():
        failed: list[BaseException] = []

        def search() -> None:
            try:
                with Client(url, retry=RetryPolicy(attempts=1)) as client:
                    client.search(queries)
            except ServiceError as error:
                failed.append(error)

        while not service.ready:  # warming up is no part of this
            pass
        searcher = threading.Thread(target=search)
        with held_engine(service.router, queries):
            searcher.start()
            while service.admission.n_in_flight == 0:
                pass
            os.kill(os.getpid(), signal.SIGTERM)
            while not service.admission.draining:
                pass
            os.kill(os.getpid(), signal.SIGTERM)
            searcher.join(300)
        return failed

    assert len(run_daemon(service, sockets, play)) == 1


def test_a_slow_change_of_the_plan_does_not_hold_up_the_end(make_service, queries):
    service = make_service(warm=False, drain_timeout_s=1)
    sockets = [bind_tcp("127.0.0.1", 0)]
    url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    (tier,) = service.router.devices
    ended, forced, told = threading.Event(), [], []

    def end_it_anyway() -> None:
        if not ended.wait(300):
            forced.append("the daemon still waits for its threads")
            service.router.close()

    def play():
        while not service.ready:
            pass
        # A page at a time, each of which seems to take a thousand seconds.
        tier._copier.send_pages = 1
        ticks = itertools.count(0, 1000)
        tier._clock = lambda: float(next(ticks))
        moved = tier.moved_bytes

        def change() -> None:
            stops = pytest.raises(OverloadedError, match="the daemon stops")
            with Client(url, retry=RetryPolicy(attempts=1)) as client, stops as error:
                client.repartition(apply=True, coverage=1.0, bandwidth_share=0.01)
            told.append(error.value)

        changer = threading.Thread(target=change)
        changer.start()
        while tier.moved_bytes == moved:
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        changer.join(300)

    watch = threading.Thread(target=end_it_anyway)
    watch.start()
    run_daemon(service, sockets, play)
    ended.set()
    watch.join()
    assert not forced
    assert len(told) == 1
    assert (service.router.residency.list_device < 0).any(), "nothing was left to move"


def test_a_device_that_never_ends_does_not_keep_the_daemon(make_service, queries, monkeypatch, caplog):
    """Neither in a scan nor in a copy: what was admitted is answered by the host, and everything ends."""
    service = make_service(router={"health": HealthPolicy(judge="all", stuck_s=0.05)}, drain_timeout_s=1)
    expected = service.router.search(queries, 5)
    sockets = [bind_tcp("127.0.0.1", 0)]
    url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"

    def play():
        found: list[object] = []

        def search() -> None:
            with Client(url, retry=RetryPolicy(attempts=1)) as client:
                found.append(client.search(queries, 5))

        def change() -> None:
            with Client(url, retry=RetryPolicy(attempts=1)) as client, contextlib.suppress(ServiceError):
                client.repartition(apply=True, coverage=1.0)

        while not service.ready:
            pass
        changer, searcher = threading.Thread(target=change), threading.Thread(target=search)
        changer.start()
        assert write.begun.wait(300)
        searcher.start()
        assert scan.begun.wait(300)
        os.kill(os.getpid(), signal.SIGTERM)
        for thread in (changer, searcher):
            thread.join(300)
        return found[0]

    with (
        Stuck(PageArena, "write") as write,
        Stuck(NativePageScanner, "scan", lambda *_: write.begun.is_set()) as scan,
    ):
        assert_same(run_daemon(service, sockets, play), expected)
        ended(service.close)
        assert not write.go_on.is_set()
    assert caplog.text.count("left behind") == 1


def test_sighup_serves_the_generation_that_is_there_now(make_service, index_path, queries, monkeypatch, caplog):
    service = make_service(warm=False)
    begun, go_on = threading.Event(), threading.Event()

    def slow_change(**_options):
        with service.changes.one_change():
            begun.set()
            assert go_on.wait(300)
        raise OverloadedError("nothing was planned", retry_after_s=1)

    def change() -> None:
        with Client(url, retry=RetryPolicy(attempts=1)) as changing, pytest.raises(OverloadedError):
            changing.repartition()

    monkeypatch.setattr(service, "repartition", slow_change)
    sockets = [bind_tcp("127.0.0.1", 0)]
    url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"

    def play():
        with Client(url, retry=RetryPolicy(attempts=20)) as client:
            while not service.ready:
                pass
            old = client.search(queries, 5)
            vectors = clustered(2500, seed=1)
            hx.build(vectors, index_path, nlist=24, metric="l2", nprobe=6, replace=True).close()
            # It waits for a change that is under way.
            changer = threading.Thread(target=change)
            changer.start()
            assert begun.wait(300)
            os.kill(os.getpid(), signal.SIGHUP)
            for _ in range(3):
                assert_same(client.search(queries, 5), old)
            go_on.set()
            changer.join(300)
            while service.generations.counts.done == 0:
                assert_same(client.search(queries, 5), old)
                assert "another change" not in caplog.text
            # A damaged one ends nothing.
            hx.build(vectors, index_path, nlist=24, metric="l2", nprobe=6, replace=True).close()
            (index_path / "gen-000003" / "model.faiss").unlink()
            os.kill(os.getpid(), signal.SIGHUP)
            while service.generations.counts.failed == 0:
                assert_same(client.search(queries, 5), old)
            said = client.status()
            client.drain()
        return said

    said = run_daemon(service, sockets, play)
    assert said["index"]["generation"] == 2
    assert "model.faiss" in said["reload"]["last_error"]


def test_keys_over_tcp(launcher, index_path, tmp_path, queries):
    keys = tmp_path / "keys.json"
    key = KeyFile(keys).add("web", "search")
    with launcher.daemon(index_path, "--host", "0.0.0.0", "--port", 0, "--keys", keys) as (process, urls):
        url = urls[0].replace("0.0.0.0", "127.0.0.1")
        with Client(url, key=key, retry=RetryPolicy(attempts=20)) as client:
            assert np.array_equal(client.search(queries, 3).ids, client.search(queries, 3).ids)
            with pytest.raises(AccessDeniedError):
                client.repartition()
        with Client(url, key="wrong") as stranger, pytest.raises(AccessDeniedError):
            stranger.status()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 0
        assert key not in process.log


def certificate(folder):
    """A new certificate for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here, and nothing else of ours can make a certificate")
    cert, private = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(private), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, private


def test_tls_is_for_tcp_alone(make_service, index_path, tmp_path, queries):
    cert, private = certificate(tmp_path)
    service = make_service(warm=False, tls_cert=cert, tls_key=private)
    expected = service.router.search(queries, 3)
    sockets = [bind_unix(tmp_path / "s"), bind_tcp("127.0.0.1", 0)]
    url = f"https://127.0.0.1:{sockets[1].getsockname()[1]}"

    def play():
        with Client(url, verify=ssl.create_default_context(cafile=str(cert))) as client:
            assert_same(client.search(queries, 3), expected)
        with Client(url, retry=RetryPolicy(attempts=1)) as doubting, pytest.raises(UnreachableError):
            doubting.status()
        with Client(f"unix:{tmp_path / 's'}") as client:
            assert_same(client.search(queries, 3), expected)
            client.drain()

    run_daemon(service, sockets, play)


def test_a_certificate_that_cannot_be_read_names_reason_and_cure(tmp_path, monkeypatch):
    for name in ("configure", "bound_arenas"):
        monkeypatch.setattr(f"hybridindex.service.daemon.{name}", lambda *_: None)
    config = ServiceConfig(tls_cert=tmp_path, tls_key=tmp_path / "key")
    with pytest.raises(InvalidInputError, match=r"tls_cert .* cannot be read: Is a directory; give the path of a file"):
        serve(tmp_path, config)
