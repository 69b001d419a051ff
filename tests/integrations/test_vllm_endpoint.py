"""The endpoint plugin in an application like vLLM's: routes, roles, refusals, the end. In vLLM itself: tests/vllm."""

from __future__ import annotations

import asyncio
import socket
from argparse import Namespace
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI

import hybridindex as hx
from hybridindex.config import RouterConfig
from hybridindex.errors import InvalidInputError, ServiceError
from hybridindex.integrations import vllm_endpoint
from hybridindex.integrations.llm_load import ENGINE_LOAD
from hybridindex.integrations.vllm_endpoint import PluginSettings, RouterPlugin, ServiceBesideLLM
from hybridindex.service.auth import KeyFile
from hybridindex.service.config import ServiceConfig
from hybridindex.tiers.contract.devices import resolve_device
from tests.clustered import clustered

LOCAL = Namespace(host="127.0.0.1", port=8000, uds=None, api_server_count=1, ssl_certfile=None)


@pytest.fixture(scope="module")
def index_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("beside") / "idx"
    with hx.build(clustered(2500, seed=1), path, nlist=24, metric="l2", nprobe=6) as index:
        profile = index.profile(clustered(300, seed=2), 6, max_seconds=1, devices=["cpu"])
        plan = index.plan(50, 16 << 20, profile, coverage=0.2)
        index.apply_plan(plan)
    return path


@pytest.fixture
def environment(index_path, monkeypatch):
    monkeypatch.setenv("HYBRIDINDEX_INDEX", str(index_path))
    monkeypatch.setenv("HYBRIDINDEX_DEVICES", "cpu")
    monkeypatch.setenv("HYBRIDINDEX_THREADS", "1")
    return monkeypatch


def served(
    check: Callable[[httpx.AsyncClient, RouterPlugin], Awaitable[None]], args: Namespace = LOCAL, root_path: str = ""
) -> None:
    """Runs ``check`` with a client of an application that has the plugin, started and ended as vLLM does."""

    async def run() -> None:
        app, plugin = FastAPI(), RouterPlugin()
        app.root_path = root_path  # as vLLM sets it
        app.add_api_route("/health", lambda: "fine")
        plugin.attach_router(app)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as http:
            assert (await http.get("/hybridindex/livez")).status_code == 503
            await plugin.init_state(None, app.state, args)
            async with app.router.lifespan_context(app):
                await check(http, plugin)
            assert (await http.get("/hybridindex/livez")).status_code == 503
            assert (await http.get("/health")).json() == "fine"

    asyncio.run(run())


def test_routes_are_below_the_prefix_and_vllms_stay(environment, index_path) -> None:
    query = clustered(1, seed=5)

    async def check(http: httpx.AsyncClient, _plugin: RouterPlugin) -> None:
        assert (index_path / "daemon.json").exists()
        found = await http.post("/hybridindex/v1/search", json={"queries": query.tolist(), "k": 3})
        with hx.open(index_path) as index, index.router() as router:
            assert found.json()["ids"] == router.search(query, k=3).ids.tolist()
        assert (await http.get("/health")).json() == "fine"
        assert (await http.get("/v1/status")).status_code == 404
        assert (await http.get("/hybridindex/nothing")).status_code == 404
        assert (await http.get("/hybridindex/v1/llm")).json()["window_ms"] is None

    served(check)
    assert not (index_path / "daemon.json").exists()
    assert not ENGINE_LOAD.wanted


@pytest.mark.parametrize("sent", ["/hybridindex/livez", "/llm/hybridindex/livez"], ids=["proxy removes", "proxy keeps"])
def test_routes_are_there_below_a_root_path(environment, sent) -> None:
    async def check(http: httpx.AsyncClient, _plugin: RouterPlugin) -> None:
        assert (await http.get(sent)).status_code == 200
        assert (await http.get(sent.replace("livez", "nothing"))).status_code == 404

    served(check, root_path="/llm")


def test_roles_hold_below_the_prefix(environment, tmp_path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    searcher, admin = keys.add("app", "search"), keys.add("root", "admin")
    environment.setenv("HYBRIDINDEX_KEYS", str(tmp_path / "keys.json"))

    async def check(http: httpx.AsyncClient, _plugin: RouterPlugin) -> None:
        async def status(path: str, key: str | None) -> int:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return (await http.post(path, json={}, headers=headers)).status_code

        assert await status("/hybridindex/v1/sessions", None) == 401
        assert await status("/hybridindex/v1/sessions", searcher) == 201
        assert await status("/hybridindex/v1/repartition", searcher) == 403
        assert await status("/hybridindex/v1/drain", searcher) == 403
        assert await status("/hybridindex/v1/repartition", admin) == 200
        assert (await http.get("/hybridindex/v1/llm")).status_code == 401

    served(check, Namespace(**{**vars(LOCAL), "host": None}))


@pytest.mark.parametrize(
    ("variables", "args", "why"),
    [
        ({"HYBRIDINDEX_INDEX": ""}, {}, "HYBRIDINDEX_INDEX is missing"),
        ({"HYBRIDINDEX_BUDGET": "8GiB"}, {}, "HYBRIDINDEX_BUDGET is '8GiB'"),
        ({"HYBRIDINDEX_THREADS": "2,3"}, {}, "HYBRIDINDEX_THREADS is '2,3'; expected one whole number"),
        ({"HYBRIDINDEX_PLAN": "best"}, {}, "plan is 'best'"),
        ({}, {"host": None}, "0.0.0.0.*key_file is missing"),
        ({}, {"host": "192.0.2.1"}, "key_file is missing"),
        ({}, {"api_server_count": 2}, "--api-server-count is above 1"),
    ],
)
def test_what_must_not_be_served_ends_vllms_start(environment, variables, args, why) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    wrong = Namespace(**{**vars(LOCAL), **args})
    with pytest.raises(InvalidInputError, match=why):
        asyncio.run(RouterPlugin().init_state(None, None, wrong))


def test_a_second_server_of_the_same_index_is_refused(environment) -> None:
    async def check(_http: httpx.AsyncClient, _plugin: RouterPlugin) -> None:
        with pytest.raises(ServiceError, match="another daemon"):
            await RouterPlugin().init_state(None, None, LOCAL)

    served(check)


def test_a_node_of_a_cluster_is_refused(tmp_path) -> None:
    file = tmp_path / "hybridindex.toml"
    file.write_text('[node]\nname = "a"\n')
    settings = PluginSettings.of({"HYBRIDINDEX_INDEX": "idx", "HYBRIDINDEX_CONFIG": str(file)})
    with pytest.raises(InvalidInputError, match=r"name in \[node\] is 'a'"):
        settings.config("127.0.0.1", None)


def test_settings_take_several_devices_and_budgets() -> None:
    settings = PluginSettings.of(
        {"HYBRIDINDEX_INDEX": "/i", "HYBRIDINDEX_DEVICES": "cuda:0, cuda:1", "HYBRIDINDEX_BUDGET": "5,6"}
    )
    config = settings.config(None, "/run/vllm.sock")
    assert (config.router.devices, config.router.device_budget_bytes, config.host) == (
        ("cuda:0", "cuda:1"),
        (5, 6),
        None,
    )
    assert config.router.health.retry_open
    closed = PluginSettings.of({"HYBRIDINDEX_INDEX": "/i", "HYBRIDINDEX_RETRY_OPEN": "0"})
    assert not closed.config(None, "/run/vllm.sock").router.health.retry_open
    with pytest.raises(InvalidInputError, match="HYBRIDINDEX_RETRY_OPEN is 'no'; expected 0 or 1"):
        PluginSettings.of({"HYBRIDINDEX_INDEX": "/i", "HYBRIDINDEX_RETRY_OPEN": "no"})


def test_a_session_without_a_window_takes_the_engines(index_path, monkeypatch) -> None:
    service = ServiceBesideLLM.open(index_path, ServiceConfig(router=RouterConfig(devices=("cpu",))))
    try:

        def budget(**options) -> int:
            name = service.open_session("me", **options)
            with service.sessions.use(name, "me") as session:
                return session._budgets.in_all

        default = budget()
        monkeypatch.setattr(ENGINE_LOAD, "window_ms", lambda: 1e-3)
        narrow = budget(window_ms=1e-3)
        assert budget() == narrow < default
        assert budget(lookahead_bytes=12345) == 12345
        # A router without a plan has nothing to turn a window into bytes with.
        monkeypatch.setattr(service.router._served.placement, "plan", None)
        assert budget() > narrow
    finally:
        service.close()


def test_what_the_index_takes_of_each_device_is_logged_beside_what_was_free(environment, monkeypatch, caplog) -> None:
    caplog.set_level("INFO", "hybridindex.integrations.vllm_endpoint")

    def opened(free: int | None) -> tuple[int, str, str]:
        """Budget, level and words. A stand-in has no memory of its own: what a GPU would tell is put in its place."""
        caplog.clear()
        plugin = RouterPlugin()
        monkeypatch.setattr(
            "hybridindex.tiers.paged.device_tier.resolve_device", lambda name: as_if(free, *resolve_device(name))
        )
        asyncio.run(plugin.init_state(None, None, LOCAL))
        record = caplog.records[0]
        asyncio.run(plugin.close())
        return int(record.args[1]) if free is None else 0, record.levelname, record.getMessage()

    taken, level, words = opened(None)
    assert 0 < taken <= 16 << 20
    assert (level, words) == ("INFO", f"cpu (stand-in): the index may take {taken} bytes of main memory")
    _, level, words = opened(taken)
    assert (level, words) == (
        "INFO",
        f"cpu (stand-in): the index may take {taken} bytes and its process 5000, {taken + 5000} were free",
    )
    assert opened(taken - 1)[1] == "WARNING"


def as_if(free: int | None, device, info):
    return device, replace(info, free_bytes=free, context_bytes=None if free is None else 5000)


def test_a_device_that_vllm_filled_is_said_with_the_numbers_and_what_helps(environment, monkeypatch, caplog) -> None:
    monkeypatch.setattr("hybridindex.tiers.paged.device_tier.available_bytes", lambda _device: 4321)

    async def check(http: httpx.AsyncClient, _plugin: RouterPlugin) -> None:
        found = await http.post("/hybridindex/v1/search", json={"queries": clustered(1, seed=5).tolist()})
        assert found.status_code == 200  # by the host

    served(check)
    [words] = [r.getMessage() for r in caplog.records if r.name.endswith("vllm_endpoint") and r.levelname == "WARNING"]
    assert "the host serves in its place" in words
    assert "4,321 are free" in words
    assert words.endswith("hybridindex vllm-args")


@pytest.mark.parametrize(("mode", "is_refused"), [(0o600, False), (0o755, False), (0o660, True), (0o777, True)])
def test_a_socket_of_vllm_that_others_may_write_to_needs_keys(tmp_path, mode, is_refused):
    path = tmp_path / "vllm.sock"
    vllm_endpoint._refuse_others(str(path))  # vLLM did not make it yet
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        path.chmod(mode)
        with pytest.raises(InvalidInputError, match="umask 077") if is_refused else nullcontext():
            vllm_endpoint._refuse_others(str(path))
