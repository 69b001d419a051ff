"""The blocking client. Generated from ``async_client.py``, which is the file to edit."""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import hybridindex.client.exchange as exchange
import hybridindex.client.messages as messages
import hybridindex.client.transport as transports
from hybridindex.client.retry import Attempts, RetryPolicy
from hybridindex.errors import InvalidInputError, UnknownSessionError
from hybridindex.processes import OfOneProcess
from hybridindex.types import I64, SearchResult

__all__ = ["Client", "RemoteSession"]

T = TypeVar("T")


class Client(OfOneProcess):
    """A daemon's client. Any thread; close it once.

    Every call raises ServiceError or one of its kinds (UnreachableError, OverloadedError, AccessDeniedError …), and
    InvalidInputError where the daemon refuses a value.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        index: str | None = None,
        timeout_s: float = 30.0,
        change_timeout_s: float = 3600.0,
        retry: RetryPolicy | None = None,
        verify: ssl.SSLContext | bool = True,
        transport: Any = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Connects when first used.

        Args:
            url: ``http://host:port``, ``https://…`` or ``unix:/path``; without a name and a password.
            key: an API key, where the daemon asks for one.
            index: the name of one of several indexes; None: the first.
            timeout_s: longest time of one call, retries and the look-up of the host's name included, however slowly an
                answer comes.
            change_timeout_s: in its place where the plan or the generation changes: lists travel meanwhile, and the
                process that plans gives way to everything else.
            verify: False, or a context, for certificates of one's own.
            transport: another httpx transport, for tests.
            sleep: waits between attempts.

        Raises:
            InvalidInputError, MissingDependencyError.
        """
        self._httpx = transports.load_httpx()
        self._address = messages.Address.parse(url)
        self._limits = transports.TimeLimits(timeout_s, change_timeout_s)
        self._retry = retry or RetryPolicy()
        self._sleep = sleep
        if transport is None:
            transport = transports.blocking_transport(self._address, verify)
        self._transport = transport
        self._request = transports.RequestMaker(self._address, key, messages.check_index(index))

    def _send(self, asked: messages.Call[T]) -> T:
        attempts = Attempts(self._retry, self._limits.of(asked))
        while True:
            left_s = attempts.remaining_s()
            try:
                request = self._request(asked, left_s)
                answer, body = exchange.answer_within(self._transport, request, left_s)
            except self._httpx.TransportError as error:
                failed = transports.unreachable(error, self._address)
                pause = attempts.pause_after(failed, repeatable=asked.repeatable or transports.never_sent(error))
            else:
                failure = messages.error_of(answer.status_code, answer.headers, body)
                if failure is None:
                    return messages.read_answer(asked, answer.status_code, body)
                pause = attempts.pause_after(failure, repeatable=True)
            self._sleep(pause)

    def search(
        self,
        queries: Any,
        k: int = 10,
        nprobe: int | None = None,
        *,
        deadline_ms: float | None = None,
        min_nprobe: int | None = None,
        candidates: int | None = None,
        allow_partial: float | None = None,
        allow_ids: Any = None,
        deny_ids: Any = None,
        where: str | None = None,
    ) -> SearchResult:
        """As :meth:`hybridindex.router.Router.search`, over the network. A deadline bounds retries as well."""
        asked = messages.search_call(
            queries,
            None,
            k=k,
            nprobe=nprobe,
            deadline_ms=deadline_ms,
            min_nprobe=min_nprobe,
            candidates=candidates,
            allow_partial=allow_partial,
            allow_ids=allow_ids,
            deny_ids=deny_ids,
            where=where,
        )
        return self._send(asked)

    def session(
        self,
        *,
        lookahead_bytes: int | None = None,
        window_ms: float | None = None,
    ) -> RemoteSession:
        """Opens a retrieval session; see :meth:`hybridindex.router.Router.session`. A context manager."""
        asked = messages.open_session_call(lookahead_bytes=lookahead_bytes, window_ms=window_ms)
        return RemoteSession(self, self._send(asked))

    def indexes(self) -> dict[str, Any]:
        """All indexes of the daemon: what each is, its plan, its share of the device budget."""
        return self._send(messages.indexes_call())

    def status(self) -> dict[str, Any]:
        """What is served, where lists are, what waits."""
        return self._send(messages.status_call())

    def plan(self, plan_id: int | str | None = None) -> dict[str, Any]:
        """The plan in force; or a stored one, by its id or "latest"."""
        return self._send(messages.plan_call(plan_id))

    def plans(self) -> dict[str, Any]:
        """Stored and applied plans."""
        return self._send(messages.plans_call())

    def repartition(self, *, apply: bool = False, **changes: Any) -> dict[str, Any]:
        """Plans anew; moves lists only where ``apply`` says so. Needs a key with the role admin.

        Args:
            changes: slo_ms, device_budget_bytes, rate_qps, coverage (or "solve"), hit_rate_model, headroom,
                row_cache_bytes (or "all"), bandwidth_share, force. Where several indexes share one budget, the daemon
                divides it anew.

        Raises:
            InfeasiblePlanError: it was to be applied, the SLO cannot be met, and ``force`` was not given.
            PlanningError: no plan was made; what serves goes on.
        """
        return self._send(messages.repartition_call(apply=apply, changes=changes))

    def apply_plan(self, plan: int | str = "latest", *, dry_run: bool = False, **options: Any) -> dict[str, Any]:
        """Makes a stored plan the one that serves; answers as :meth:`repartition`. Needs a key with the role admin.

        Args:
            options: bandwidth_share, force.

        Raises:
            InfeasiblePlanError: it cannot meet its SLO, and ``force`` was not given.
        """
        return self._send(messages.apply_plan_call(plan, dry_run=dry_run, options=options))

    def upload_queries(self, queries: Any) -> dict[str, Any]:
        """Gives recent (n, d) float32 queries to the refresh, to plan from. Needs a key with the role admin.

        Raises:
            ProfileError: the daemon keeps no queries.
        """
        return self._send(messages.recent_call(queries))

    def reload(self) -> dict[str, Any]:
        """Lets the current generation of the index directory serve. Needs a key with the role admin.

        Raises:
            ReloadError: the generation before goes on serving, and why.
        """
        return self._send(messages.reload_call())

    def add(
        self,
        vectors: Any,
        ids: Any = None,
        attributes: Any = None,
        *,
        idempotency_key: str | None = None,
    ) -> I64:
        """As :meth:`hybridindex.api.Index.add`, of the index that is served; the ids. Searches that begin afterwards
        find the rows. Needs a key with the role write.

        Args:
            vectors: (d,) or (n, d) float32.
            ids: (n,) integers of 0 or more; None: numbers above all that are there.
            attributes: a mapping of names to columns, a pyarrow Table or RecordBatch, or a DataFrame.
            idempotency_key: the daemon makes a change of one key once; None: one of this call, for its own retries.

        Raises:
            DuplicateIdError: an id is there.
            BusyWritingError: rows come faster than lists can be written anew, until the time of the call was over.
            UnsupportedIndexError: rows of the index's codec cannot be changed. BuildError: another process writes.
        """
        asked = messages.rows_call(vectors, ids, attributes, replaces=False, key=idempotency_key)
        return messages.ids_of(self._send(asked), ids)

    def upsert(
        self,
        vectors: Any,
        ids: Any,
        attributes: Any = None,
        *,
        idempotency_key: str | None = None,
    ) -> int:
        """As :meth:`add`, in the place of all rows that have these ids; how many ids were there."""
        if ids is None:
            raise InvalidInputError("ids is None; expected the id of each row")
        asked = messages.rows_call(vectors, ids, attributes, replaces=True, key=idempotency_key)
        return messages.count_of(self._send(asked), "replaced")

    def delete(
        self,
        ids: Any = None,
        *,
        where: str | None = None,
        idempotency_key: str | None = None,
    ) -> int:
        """As :meth:`hybridindex.api.Index.delete`, of the index that is served; how many ids were deleted.
        Searches that begin afterwards leave them out. Needs a key with the role write. ``idempotency_key``: as of
        :meth:`add`."""
        answer = self._send(messages.delete_call(ids, where, key=idempotency_key))
        return messages.count_of(answer, "deleted")

    def add_documents(
        self,
        documents: Iterable[Mapping[str, Any]],
        *,
        words: int | None = None,
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:
        """Adds documents to an index that was made of documents, or replaces those of the same sources: the daemon cuts
        and embeds them, and only what changed. What became of sources and chunks. Searches that begin afterwards find
        them. Needs a key with the role write.

        Args:
            documents: mappings with ``source``, the name, and ``text``; and maybe ``title``, ``format`` ("text" or
                "html") and ``metadata``, of which those that are attributes of the index can be filtered by.
            words: most words of a chunk; None: as the documents were read before.
            idempotency_key: as of :meth:`add`.

        Raises:
            NoDocumentsError: the index has no documents.
            NoEmbedderError: the daemon has not the embedder of the documents that are there.
            EmbeddingError: the embedder failed, and nothing was changed.
            InvalidInputError, BusyWritingError, BuildError: as :meth:`add`.
        """
        return self._send(messages.add_documents_call(documents, words=words, key=idempotency_key))

    def delete_documents(
        self,
        sources: Iterable[str],
        *,
        idempotency_key: str | None = None,
    ) -> int:
        """Removes documents with all their chunks; how many were there. Needs a key with the role write.
        ``idempotency_key``: as of :meth:`add`."""
        answer = self._send(messages.delete_documents_call(sources, key=idempotency_key))
        return messages.count_of(answer, "sources", "removed")

    def compact(self, *, wait: bool = True) -> dict[str, Any]:
        """As :meth:`hybridindex.api.Index.compact`, of the index that is served, which goes on serving. Needs a key
        with the role admin.

        Args:
            wait: False: answers when it has begun.
        """
        return self._send(messages.compact_call(wait=wait))

    def drain(self) -> None:
        """Lets the daemon finish and stop, with all its indexes. Needs a key with the role admin."""
        self._send(messages.drain_call())

    def close(self) -> None:
        """Closes the connections. Closing twice is harmless."""
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class RemoteSession(OfOneProcess):
    """A session of a daemon; made by :meth:`Client.session`. It ends when closed, or when unused for a while."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = name
        self._closed = False

    def lookahead(
        self,
        drafts: Any,
        *,
        nprobe: int | None = None,
        budget_bytes: int | None = None,
        window_ms: float | None = None,
    ) -> None:
        """Starts moving the lists that ``drafts`` (d,) or (n, d) float32 would probe; does not wait for them. See
        :meth:`hybridindex.router.session.Session.lookahead`."""
        asked = messages.lookahead_call(
            drafts, self._name, nprobe=nprobe, budget_bytes=budget_bytes, window_ms=window_ms
        )
        self._client._send(asked)

    def search(
        self,
        queries: Any,
        k: int = 10,
        nprobe: int | None = None,
        *,
        deadline_ms: float | None = None,
        min_nprobe: int | None = None,
        candidates: int | None = None,
        allow_partial: float | None = None,
        allow_ids: Any = None,
        deny_ids: Any = None,
        where: str | None = None,
    ) -> SearchResult:
        """As :meth:`Client.search`, within the session."""
        asked = messages.search_call(
            queries,
            self._name,
            k=k,
            nprobe=nprobe,
            deadline_ms=deadline_ms,
            min_nprobe=min_nprobe,
            candidates=candidates,
            allow_partial=allow_partial,
            allow_ids=allow_ids,
            deny_ids=deny_ids,
            where=where,
        )
        return self._client._send(asked)

    def stats(self) -> dict[str, Any]:
        """What lookahead did so far."""
        return self._client._send(messages.session_call(self._name))

    def close(self) -> None:
        """Ends it; one that is over already is no error."""
        if not self._closed:
            self._closed = True
            # Unknown: it expired, or an earlier attempt of this very call ended it.
            with contextlib.suppress(UnknownSessionError):
                self._client._send(messages.close_session_call(self._name))

    def __enter__(self) -> RemoteSession:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
