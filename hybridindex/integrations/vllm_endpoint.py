"""vLLM's endpoint plugin (``vllm.endpoint_plugins``): the daemon's routes under ``/hybridindex`` in vLLM's API server.

The router opens when vLLM's engine runs: its KV cache has its size by then, and nothing is freed while it starts. vLLM
loads the plugin only where ``VLLM_PLUGINS=hybridindex`` says so; what to serve is in the environment and a settings
file (:class:`PluginSettings`). vLLM's ``--api-key`` does not guard these routes: keys are our own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybridindex import filesystem
from hybridindex.errors import InvalidInputError, MissingFileError, ProfileError
from hybridindex.integrations.llm_load import ENGINE_LOAD
from hybridindex.integrations.vllm import room_beside
from hybridindex.service.auth import Keyring
from hybridindex.service.config import ServiceConfig
from hybridindex.service.core import Service
from hybridindex.service.daemon_address import DaemonAddress
from hybridindex.service.http.app import create_app
from hybridindex.service.http.middleware import send_problem
from hybridindex.service.http.problems import Problem
from hybridindex.service.serving import MakeRefresher, RefreshConfig, refresh_config, refresher_of
from hybridindex.service.settings import Settings, Table, read_settings

__all__ = ["PREFIX", "PluginSettings", "RouterPlugin", "ServiceBesideLLM"]

_log = logging.getLogger(__name__)

PREFIX = "/hybridindex"
_VARIABLE = "HYBRIDINDEX_"
#: Of a settings file.
_VLLMS_OWN = {"host", "port", "uds", "tls_cert", "tls_key", "drain_timeout_s", "log_format", "traces"}

Scope = MutableMapping[str, Any]
Asgi = Callable[[Scope, Any, Any], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """What the environment says: ``HYBRIDINDEX_INDEX``, the settings file ``HYBRIDINDEX_CONFIG``, and what overrides
    it (docs/vllm.md)."""

    index: Path
    file: Settings
    #: As tables of the file.
    given: Table
    #: Whether the load is followed; None: what the file says.
    refresh: bool | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> PluginSettings:
        """Raises InvalidInputError: a variable is missing or wrong, by name; or the file cannot be read."""

        def said(name: str) -> str | None:
            return environment.get(_VARIABLE + name) or None

        def words(name: str) -> tuple[str, ...] | None:
            return tuple(word.strip() for word in (said(name) or "").split(",") if word.strip()) or None

        def whole(name: str) -> tuple[int, ...]:
            found = words(name) or ()
            if not all(word.isdecimal() for word in found):
                raise InvalidInputError(f"{_VARIABLE}{name} is {said(name)!r}; expected whole numbers, with commas")
            return tuple(int(word) for word in found)

        def one(name: str) -> int | None:
            found = whole(name)
            if len(found) > 1:
                raise InvalidInputError(f"{_VARIABLE}{name} is {said(name)!r}; expected one whole number")
            return found[0] if found else None

        if (index := said("INDEX")) is None:
            raise InvalidInputError(f"{_VARIABLE}INDEX is missing; expected the index directory that vLLM shall serve")

        def switch(name: str) -> bool | None:
            if (word := said(name)) not in (None, "0", "1"):
                raise InvalidInputError(f"{_VARIABLE}{name} is {word!r}; expected 0 or 1")
            return None if word is None else word == "1"

        router = {
            "devices": words("DEVICES"),
            "device_budget_bytes": whole("BUDGET") or None,
            "threads": one("THREADS"),
            "health": {"retry_open": switch("RETRY_OPEN")},
        }
        given = {"router": router, "plan": said("PLAN"), "store_url": said("STORE"), "key_file": said("KEYS")}
        config = said("CONFIG")
        file = Settings() if config is None else read_settings(Path(config))
        return cls(index=Path(index), file=file, given=given, refresh=switch("REFRESH"))

    def planning(self) -> RefreshConfig:
        """The table [refresh]. Raises InvalidInputError for bad values."""
        return refresh_config(self.file, {})

    def make_refresher(self) -> MakeRefresher | None:
        """What follows the load, where the table [refresh] or ``HYBRIDINDEX_REFRESH`` asks for it. Raises
        InvalidInputError for bad values."""
        return refresher_of(self.file, self.planning(), asked=self.refresh)

    def config(self, host: str | None, uds: str | None) -> ServiceConfig:
        """The daemon's, for vLLM's address. Without a host vLLM listens on all of them.

        Raises:
            InvalidInputError: a bad value, a node of a cluster, or other machines reach vLLM and there is no key file.
        """
        if unused := self.file.names() & _VLLMS_OWN:
            _log.info("settings that are ignored because vLLM's server has its own: %s", ", ".join(sorted(unused)))
        address = {
            "host": False if uds else host or "0.0.0.0",  # noqa: S104 - what vLLM does, so that it is refused without keys
            "uds": uds or False,
        }
        config = self.file.without("refresh", "indexes").build(ServiceConfig, {**self.given, **address})
        if config.node.name is not None:
            raise InvalidInputError(
                f"name in [node] is {config.node.name!r}: other nodes cannot reach a node inside vLLM's server; "
                "start a node beside vLLM with hybridindex cluster start, and search through it"
            )
        return config


class ServiceBesideLLM(Service):
    """A service whose sessions have the windows of measured steps; where no step was measured, and they name none, the
    mean of the engine's finished requests."""

    def open_session(
        self,
        client: str,
        *,
        lookahead_bytes: int | None = None,
        window_ms: float | None = None,
    ) -> str:
        live = ENGINE_LOAD.window_ms() if self.router.window_ms is None and self.router.plan is not None else None
        if lookahead_bytes is None and window_ms is None and live is not None:
            with contextlib.suppress(ProfileError):  # its profile timed no copies: the router's own default then
                return super().open_session(client, window_ms=live)
        return super().open_session(client, lookahead_bytes=lookahead_bytes, window_ms=window_ms)


def _refuse_others(uds: str) -> None:
    """vLLM makes its socket with the rights that the umask leaves; without keys whoever may write to it is an admin."""
    with contextlib.suppress(MissingFileError):
        if filesystem.others_may_write(uds):
            raise InvalidInputError(
                f"others may write to {uds}, who have all rights without keys; start vLLM with umask 077, or set keys "
                "(HYBRIDINDEX_KEYS)"
            )


@dataclass(slots=True)
class RouterPlugin:
    """The plugin: vLLM first calls :meth:`attach_router`, then :meth:`init_state`. On its API server's event loop."""

    name: str = "hybridindex"
    required_tasks: tuple[Any, ...] | None = ("generate",)
    _app: Asgi | None = None
    _stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    def attach_router(self, app: Any) -> None:
        """Adds ``/hybridindex`` to vLLM's application, and :meth:`close` to its lifespan."""
        app.mount(PREFIX, self._serve, name=self.name)
        around = app.router.lifespan_context

        @contextlib.asynccontextmanager
        async def lifespan(inner: Any) -> AsyncIterator[Any]:
            async with around(inner) as state:
                try:
                    yield state
                finally:
                    await self.close()

        app.router.lifespan_context = lifespan

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Opens index and router.

        Raises:
            HybridIndexError: a bad environment, address, index, plan or device. It ends vLLM's start.
        """
        settings = PluginSettings.of(os.environ)
        if (getattr(args, "api_server_count", None) or 1) > 1:
            raise InvalidInputError("--api-server-count is above 1; expected 1: one router sees the whole load")
        uds, port = getattr(args, "uds", None), getattr(args, "port", 8000)
        config = settings.config(getattr(args, "host", None), uds)
        keyring = None if config.key_file is None else Keyring(config.key_file)
        if uds and keyring is None:
            _refuse_others(uds)
        async with contextlib.AsyncExitStack() as stack:
            address = DaemonAddress(settings.index)
            stack.callback(address.leave)
            # On a thread: opening reads the whole index and fills the arenas.
            service = await asyncio.to_thread(_open_beside, settings, config)
            stack.push_async_callback(asyncio.to_thread, service.close)
            own = create_app(service, keyring=keyring)
            own.add_api_route("/v1/llm", _show_load, methods=["GET"], summary="What the engine tells the router")
            await stack.enter_async_context(own.router.lifespan_context(own))
            ENGINE_LOAD.attach()
            stack.callback(ENGINE_LOAD.detach)
            if not uds:
                scheme = "https" if getattr(args, "ssl_certfile", None) else "http"
                urls = (f"{scheme}://{_host(config.host)}:{port}{PREFIX}",)
                address.announce(urls, service.index.ivf.generation)
                service.generations.on_generation.append(lambda number: address.announce(urls, number))
            self._app = own
            self._stack = stack.pop_all()
        _log.info("hybridindex serves %s below %s", settings.index, PREFIX)

    async def close(self) -> None:
        """Answers what was admitted and closes the router. Closing twice is harmless."""
        self._app = None
        await self._stack.aclose()

    async def _serve(self, scope: Scope, receive: Any, send: Any) -> None:
        """Removes the prefix: our application checks roles by its own paths.

        With ``--root-path``, a proxy may have removed that root before, or left it.
        """
        if scope["type"] != "http":
            return
        if self._app is None:
            await send_problem(Problem(503, "not-ready", "Not ready", "the router is not open"), "", send)
            return
        root, whole = scope.get("root_path", ""), scope["path"]
        path = whole.removeprefix(root if whole.startswith(root) else PREFIX) or "/"
        await self._app({**scope, "path": path, "raw_path": path.encode(), "root_path": ""}, receive, send)


def _open_beside(settings: PluginSettings, config: ServiceConfig) -> Service:
    """Opens the service and logs, for each device, what the index takes and what vLLM left free."""
    service = ServiceBesideLLM.open(
        settings.index, config, make_refresher=settings.make_refresher(), planning=settings.planning()
    )
    for tier in service.router.devices:
        wanted = tier.capacity_bytes + tier.reserved_bytes
        if tier.disabled_reason or tier.failure is not None:
            _log.warning(
                "%s: the host serves in its place: %s. For what vLLM may take beside a plan, run hybridindex vllm-args",
                tier.label,
                tier.disabled_reason or tier.failure,
            )
        elif tier.info.free_bytes is None:
            _log.info("%s: the index may take %d bytes of main memory", tier.label, wanted)
        else:
            free, context = tier.info.free_bytes, tier.info.context_bytes
            words, enough = room_beside(free, index_bytes=wanted, context_bytes=context)
            _log.log(logging.INFO if enough else logging.WARNING, "%s: %s", tier.label, words)
    return service


def _host(host: str | None) -> str:
    bare = "127.0.0.1" if host in (None, "0.0.0.0") else str(host)  # noqa: S104 - compared, not bound
    return f"[{bare}]" if ":" in bare else bare


async def _show_load() -> dict[str, Any]:
    return asdict(ENGINE_LOAD.read())
