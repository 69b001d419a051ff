"""What users hold: an index that can profile itself, plan for an SLO and serve.

Each method hands over to the room that owns the work; nothing is computed here. Longer than other files: most of it is
what the public methods promise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np

from hybridindex import filesystem
from hybridindex.config import PrecisionName, RouterConfig, RouterOptions, RowsName
from hybridindex.errors import InvalidInputError, StoreError
from hybridindex.types import (
    DEFAULT_HEADROOM,
    F32,
    I64,
    HitRateChoice,
    LLMProfile,
    Metric,
    Profile,
    SearchResult,
    VectorFile,
)

if TYPE_CHECKING:
    from hybridindex.index.changes.writer import Durability, IndexWriter
    from hybridindex.index.ivf import IVFIndex
    from hybridindex.index.rabitq.spec import RabitqSpec
    from hybridindex.index.source import VectorSource
    from hybridindex.partitioner.plan import Plan
    from hybridindex.router.remote.remote_lists import RemoteLists
    from hybridindex.router.router import Router
    from hybridindex.store.control import ControlStore

__all__ = [
    "Index",
    "Progress",
    "build",
    "copy_store",
    "from_faiss",
    "open_index",
    "remove_replaced",
    "restore",
    "rollback",
]

_log = logging.getLogger(__name__)

#: The control store beside an index.
STORE_FILE = "control.sqlite"

#: progress(stage, done, total): total is None while it is not known.
Progress = Callable[[str, int, int | None], None]


class Index:
    """An open index. Safe to share between threads; close it after its routers."""

    def __init__(self, ivf: IVFIndex, *, write: bool = False, durability: Durability = "synced") -> None:
        from hybridindex.index.changes.writer import IndexWriter
        from hybridindex.plans.following import Following

        # No callback names this object: files stay mapped, and disk space taken, while objects name each other.
        self._writer = IndexWriter(ivf, durability=durability, on_compaction=_take_over_profiles)
        self._following = Following(self._writer, partial(_profiles, ivf.path))
        if write:
            self._writer.keep()

    # What it is

    @property
    def ivf(self) -> IVFIndex:
        """The index proper: lists, centroids, codec (:class:`hybridindex.index.ivf.IVFIndex`); another one after each
        compaction."""
        return self._writer.newest

    @property
    def _ivf(self) -> IVFIndex:
        return self._writer.newest

    @property
    def writer(self) -> IndexWriter:
        """Who writes, and compacts."""
        return self._writer

    @property
    def path(self) -> Path:
        """Directory of the index."""
        return self._ivf.path

    @property
    def metric(self) -> Metric:
        """``"l2"`` or ``"ip"``, of all distances."""
        return self._ivf.metric

    @property
    def codec(self) -> str:
        """How lists store rows: ``"flat"``, float32, or by what compresses them."""
        return self._ivf.codec

    @property
    def dim(self) -> int:
        """Dimension of queries."""
        return self._ivf.dim

    @property
    def count(self) -> int:
        """Vectors in the lists as they were written, deleted ones included; :attr:`n_live` counts what is found."""
        return self._ivf.count

    @property
    def nlist(self) -> int:
        """Number of lists."""
        return self._ivf.nlist

    @property
    def nprobe(self) -> int:
        """Lists probed per query where nothing else is said."""
        return self._ivf.nprobe

    @property
    def centroids(self) -> F32:
        """(nlist, d) float32, after pre-transforms."""
        return self._ivf.centroids

    @property
    def list_sizes(self) -> I64:
        """(nlist,) int64 vectors per list."""
        return self._ivf.list_sizes

    @property
    def list_bytes(self) -> I64:
        """(nlist,) int64 code bytes per list."""
        return self._ivf.list_bytes

    @property
    def fingerprint(self) -> str:
        """Names this content; profiles and plans are tied to it."""
        return self._ivf.fingerprint

    def __repr__(self) -> str:
        return (
            f"<hybridindex.Index {str(self.path)!r}: {self.count:,} x {self.dim}, nlist {self.nlist}, "
            f"{self.codec}, {self.metric}>"
        )

    # What it can do

    def store(self, url: str | None = None, *, required: bool = True) -> ControlStore:
        """Opens the control store: ``control.sqlite`` beside the index, or a SQLAlchemy URL. The caller closes it.

        ``required``: False: one that cannot be opened now is opened by a later call.
        """
        from hybridindex.store.control import ControlStore

        return ControlStore.open(url or self.path / STORE_FILE, required=required)

    def profile(
        self,
        queries: Any,
        nprobe: int | None = None,
        *,
        precision: PrecisionName = "auto",
        recall: float | None = None,
        k: int = 10,
        threads: int | None = None,
        devices: Sequence[str] | Literal[0] | None = None,
        max_seconds: float = 60.0,
        seed: int = 0,
        rows: RowsName = "resident",
        save: bool = True,
        store_url: str | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> Profile:
        """Measures access skew and latencies with calibration queries, and stores the result.

        Args:
            queries: (n, d) float32 calibration queries, as many as there are: a few hundred at least.
            nprobe: lists per query; default the index's. Give this or ``recall``.
            precision: what is searched and placed: "codes" or "rows"; "auto": codes where the index has them.
            recall: target recall@k in (0, 1]; the smallest nprobe that reaches it is used.
            k: neighbours per query.
            threads: host threads per scan; None: faiss's own setting.
            devices: also time scans and copies on these devices; None: on those that this machine has, GPUs or else the
                stand-in. 0, or an empty list: on none.
            max_seconds: about how long latency measurements may take.
            seed: of the split into halves and of the measured batches.
            rows: "mapped": of searches by codes with rows on disk; also measures what reading them takes, and drops
                them from memory for it.
            save: write it into the control store.
            store_url: another control store than the one beside the index.
            progress: see :data:`Progress`.
            options: further fields of :class:`hybridindex.profiler.request.ProfileRequest`, and ``checkpoint``, see
                :func:`hybridindex.profiler.run.profile_index`; it is removed when all is measured and stored.

        Raises:
            InvalidInputError, ProfileError, StoreError: it cannot be measured, or stored.
            UnsupportedIndexError: codes were asked for, and the index has none.
        """
        from hybridindex.plans.precision import view_to_profile
        from hybridindex.profiler.access import split_halves
        from hybridindex.profiler.device import devices_to_time
        from hybridindex.profiler.request import ProfileRequest
        from hybridindex.profiler.routed import time_routed
        from hybridindex.profiler.run import profile_index

        if nprobe is not None and recall is not None:
            raise InvalidInputError("nprobe and recall were both given; give one: recall chooses nprobe")
        host_scanner = options.get("host_scanner", "auto")
        view = view_to_profile(self._ivf, precision, host_scanner, mapped=rows == "mapped")
        chosen = devices_to_time(view, () if devices == 0 else devices, host_scanner)
        checkpoint = options.pop("checkpoint", None)
        request = ProfileRequest(
            nprobe=nprobe,
            recall_target=recall,
            k=k,
            threads=threads,
            devices=chosen,
            max_seconds=max_seconds,
            seed=seed,
            rows=rows,
            **options,
        )
        profile = profile_index(view, queries, request, progress=progress, checkpoint=checkpoint)
        # The half that did not choose the hot lists; routed last, because it needs the rest of the profile.
        held = split_halves(len(queries), seed)[1]
        routed = time_routed(
            view,
            profile,
            np.asarray(queries)[held],
            devices=chosen,
            device_budget_bytes=request.device_budget_bytes,
            max_seconds=max_seconds / 4,
            rows=request.rows,
            progress=progress,
        )
        profile = replace(profile, stages=profile.stages + routed)
        if save:
            with self.store(store_url) as store:
                profile = store.save_profile(profile)
        if checkpoint is not None:
            filesystem.discard(checkpoint)
        return profile

    def plan(
        self,
        slo_ms: float,
        device_budget_bytes: int | Sequence[int],
        profile: Profile | None = None,
        *,
        precision: PrecisionName = "auto",
        rate_qps: float | None = None,
        llm: LLMProfile | None = None,
        n_devices: int = 1,
        epsilon: float | None = None,
        percentile: float = 90,
        coverage: float | None = None,
        slo_stage: Literal["search", "ttft"] = "search",
        hit_rate_model: HitRateChoice = "best",
        headroom: float = DEFAULT_HEADROOM,
        row_cache_bytes: int | None = None,
        allow_other_hardware: bool = False,
        store_url: str | None = None,
    ) -> Plan:
        """Decides which lists to keep on the devices so that search meets ``slo_ms``. Moves nothing, stores nothing:
        :meth:`apply_plan` stores a plan.

        Devices are taken to be of the kind that this machine has: GPUs, or else the stand-in.

        Args:
            slo_ms: search latency target, queueing included (``slo_stage="ttft"``: search and LLM prefill).
            device_budget_bytes: hard limit per device, temporary buffers included: one for all, or one per device.
            profile: what to decide from; default the newest stored profile of this index and machine.
            precision: what devices hold: "codes" or "rows"; "auto": what the profile is of, and codes where there are
                stored profiles of both.
            rate_qps: arrival rate to sustain; without it and without ``llm``, solve for single queries.
            llm: throughput of the LLM against its KV-cache size.
            n_devices: devices to place on.
            epsilon: queueing factor (VectorLiteRAG, Eq. 3); 1 is the worst case. None: from the rate.
            percentile: of the SLO.
            coverage: fraction of lists to place, instead of solving for it.
            slo_stage: what the SLO bounds.
            hit_rate_model: "beta" (VectorLiteRAG's), "beta_binomial", "empirical", or "best": the one of them that
                predicts held-back queries best.
            headroom: what search must have to spare, as a fraction: of the rate and of the SLO.
            row_cache_bytes: host memory that is left for rows, where they stay on disk (``rows="mapped"``); the plan
                then counts pages that are read. None: all rows are in memory.
            allow_other_hardware: accept a profile that was measured on another machine.
            store_url: another control store than the one beside the index.

        Raises:
            InvalidInputError, ProfileError, ProfileMismatchError: no plan can be made. An SLO that cannot be met is a
                verdict, not an error.
        """
        from hybridindex.plans.planner import devices_of, plan_index
        from hybridindex.plans.precision import view_of_profile, view_to_plan
        from hybridindex.plans.replan import PlanChanges
        from hybridindex.profiler.hardware import hardware_info

        if profile is None:
            with self.store(store_url) as store:
                view = view_to_plan(self._ivf, store, precision, any_hardware=allow_other_hardware)
                profile = store.load_profile(
                    index_fingerprint=view.fingerprint,
                    hardware_fingerprint=None if allow_other_hardware else hardware_info().fingerprint,
                )
        else:
            view = view_of_profile(self._ivf, profile, precision)
        asked = PlanChanges(
            slo_ms=slo_ms,
            device_budget_bytes=device_budget_bytes,
            rate_qps=rate_qps,
            llm=llm,
            epsilon=epsilon,
            percentile=percentile,
            coverage=coverage,
            slo_stage=slo_stage,
            hit_rate_model=hit_rate_model,
            headroom=headroom,
            row_cache_bytes=row_cache_bytes,
        )
        devices = devices_of(view, n_devices)
        return plan_index(view, profile, asked, devices, allow_other_hardware=allow_other_hardware)

    def apply_plan(self, plan: Plan | int, *, force: bool = False, store_url: str | None = None) -> int:
        """Makes a plan the current one, which daemons serve and a restart resumes; returns its id. Moves nothing: a
        running daemon is told by its own client, a router by :meth:`hybridindex.router.Router.apply_plan`.

        Args:
            plan: as :meth:`plan` returned it (it is stored then), or the id of a stored one.
            force: also where it is infeasible.
            store_url: another control store than the one beside the index.

        Raises:
            InfeasiblePlanError: it is infeasible, and ``force`` is false.
            ProfileError, ProfileMismatchError: there is no such plan, or it is another index's. StoreError.
        """
        from hybridindex.plans.current import apply_offline
        from hybridindex.plans.precision import choose_view, view_of

        with self.store(store_url) as store:
            if isinstance(plan, int):
                view = choose_view(self._ivf, store, str(plan))
            else:
                view = view_of(self._ivf, plan.index_fingerprint) or self._ivf
            return apply_offline(view, store, plan, force=force)

    def current_plan(self, *, precision: PrecisionName = "auto", store_url: str | None = None) -> Plan | None:
        """The plan that was applied last; None where none was.

        Args:
            precision: of codes or of rows alone; "auto": of either.

        Raises:
            ProfileMismatchError: it was made on another machine. StoreError.
        """
        from hybridindex.plans.current import current_plan
        from hybridindex.plans.precision import choose_view

        with self.store(store_url) as store:
            return current_plan(store, choose_view(self._ivf, store, "current", precision))

    def router(
        self,
        plan: Plan | None = None,
        devices: Sequence[str] | None = None,
        *,
        config: RouterConfig | None = None,
        llm: LLMProfile | None = None,
        follow: bool = True,
        remote: RemoteLists | None = None,
        **settings: Unpack[RouterOptions],
    ) -> Router:
        """Starts serving; see :class:`hybridindex.router.Router`. A context manager; close it before the index.

        Args:
            plan: what to keep on the devices; None: nothing.
            devices: "cuda:N", or "cpu" for the stand-in device in RAM; default the configuration's.
            config: default :class:`hybridindex.config.RouterConfig`'s own.
            llm: whose measured step times are the windows of lookahead; None: the plan's.
            follow: when the index was compacted, here or by another process, the router serves the new generation, by
                a plan for the same request. False: it keeps the one that it has, and sees all changes.
            remote: as :class:`hybridindex.router.Router`; such a router does not follow.
            settings: fields of ``config``, which they and ``devices`` override.
        """
        from hybridindex.router.router import Router

        config = config or RouterConfig()
        chosen = config.devices if devices is None else devices
        router = Router(self._ivf, plan=plan, config=config, llm=llm, remote=remote, devices=chosen, **settings)
        measured = router.host_scanner if plan is None else plan.analysis.profile.scanner
        if router.host_scanner != measured:
            same = plan is not None and plan.index_fingerprint == router.index_fingerprint
            _log.warning(
                "the plan's profile timed the host scanner %s, but %s serves: its predictions will be off; %s",
                measured,
                router.host_scanner,
                "profile again" if same else "without devices a plan of the other precision gives nprobe alone",
            )
        if plan is not None and (plan.request.row_cache_bytes is None) == (router.config.rows == "mapped"):
            _log.warning(
                "the plan is for rows %s, but rows is %r: its predictions will be off; plan again %s --row-cache",
                "in memory" if plan.request.row_cache_bytes is None else "on disk",
                router.config.rows,
                "with" if plan.request.row_cache_bytes is None else "without",
            )
        if follow and remote is None:
            self._following.add(router)
        return router

    def search(self, queries: Any, k: int = 10, nprobe: int | None = None) -> SearchResult:
        """One search on the host, for trying things: opens a router and closes it again. A server keeps a router.

        Args:
            queries: (d,) or (n, d) float32; (d,) answers (1, k).
            k: neighbours per query.
            nprobe: lists per query; default the index's.

        Raises:
            InvalidInputError: names the argument.
        """
        with self.router(devices=(), warm_bytes=0, scrub_bytes_per_s=0, follow=False) as router:
            return router.search(queries, k, nprobe)

    def save(self, path: str | Path, *, plans: bool = True, **options: Any) -> Index:
        """Writes a copy of this generation to another directory and opens it.

        Args:
            path: new, empty, or with ``replace=True`` an index that gets a new generation.
            plans: profiles and plans go with it: the control store beside the index is copied as a whole. One that
                lies elsewhere (``store_url``) is not: the copy has the same fingerprint, so it serves both.
            options: ``replace`` and ``progress``, see :func:`hybridindex.index.opening.save`.

        Raises:
            InvalidInputError: ``path`` holds something else.
            StoreError: it has a control store already; or the copy of the store failed, after that of the index.
        """
        from hybridindex.index import save
        from hybridindex.index.filters.write_attributes import copy_attributes
        from hybridindex.index.storage.generation import as_path

        here, there = self.path / STORE_FILE, as_path(path) / STORE_FILE
        plans = plans and filesystem.exists(here) and here.resolve() != there.resolve()
        if plans and filesystem.exists(there):
            raise StoreError(
                f"path {str(path)!r} has a control store already, {STORE_FILE}; expected plans=False, which leaves "
                "it as it is, or a path without one"
            )
        # One generation, whatever a compaction puts in its place meanwhile.
        ivf = self._ivf
        copy = Index(save(ivf, path, **options))
        try:
            if ivf.attributes is not None:
                copy_attributes(ivf, copy.ivf)
            if plans:
                with self.store() as store:
                    store.copy_to(there)
        except BaseException:
            copy.close()
            raise
        return copy

    def compress(
        self,
        bits: int = 1,
        *,
        recall_loss: float = 0.005,
        queries: Any = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> RabitqSpec:
        """Puts RaBitQ codes beside the rows, which routers opened from now on scan first.

        Args:
            bits: of a dimension: 1, 2 or 4.
            recall_loss: share of recall@k that a search may lose on average, against a scan of the rows.
            queries: (n, dim) float32, some hundred, that the candidates of a search are measured with; None: rows of
                the index with a little noise, which lie nearer to the rows than real queries may.
            seed: of the rotation and of what is sampled.
            progress: see :data:`Progress`.

        Raises:
            InvalidInputError, UnsupportedIndexError, BuildError: see :func:`hybridindex.index.compress.compress`.
        """
        from hybridindex.index import compress

        return compress(self._ivf, bits, recall_loss, queries, seed, progress)

    def remove_codes(self) -> int:
        """Removes the codes beside the rows; returns their bytes.

        Raises:
            BuildError: see :func:`hybridindex.index.compress.remove_codes`.
        """
        from hybridindex.index import remove_codes

        return remove_codes(self._ivf)

    def delete(self, ids: Any = None, *, where: str | None = None) -> int:
        """Deletes rows: durable when it returns, and left out of every search of this process that begins then. Open
        indexes of other processes follow within a second.

        Args:
            ids: (m,) integers; those that are not there change nothing.
            where: or a condition on attributes.

        Returns:
            How many ids were deleted.

        Raises:
            InvalidInputError, BuildError, FileError: see :func:`hybridindex.index.changes.write.delete`.
        """
        return self._writer.delete(ids, where)

    def add(self, vectors: Any, ids: Any = None, attributes: Any = None) -> I64:
        """Adds rows: durable when it returns, and found by every search of this process that begins then. Open indexes
        of other processes follow within a second.

        Args:
            vectors: (n, dim), or (dim,) for one row, of elements that a build takes.
            ids: (n,) integers of 0 or more, all different; none may be there. None: numbers above all that are there.
            attributes: a pyarrow Table or RecordBatch, a DataFrame or a mapping of names to columns, a record for each
                row, of columns that the index has. None: missing values.

        Returns:
            (n,) int64, the ids.

        Raises:
            DuplicateIdError: an id is there, or given twice.
            BusyWritingError: rows come faster than lists can be written anew; says when to try again.
            InvalidInputError, UnsupportedIndexError, BuildError, FileError: see
                :func:`hybridindex.index.changes.write.add`.
        """
        return self._writer.add(vectors, ids, attributes)

    def upsert(self, vectors: Any, ids: Any, attributes: Any = None) -> int:
        """Adds rows in the place of all that have these ids, at once; how many ids were there. Otherwise as
        :meth:`add`, whose errors it raises, but for ids that are there."""
        return self._writer.upsert(vectors, ids, attributes)

    def compact(self, progress: Progress | None = None) -> bool:
        """Writes the lists anew, with what was added and without what was deleted: long lists are split, short ones
        dissolved, and rows move to the list that is nearest now. Searches and changes go on. An index that is open for
        writing does it by itself; this does it now, and returns when open routers of this index serve the new lists.

        Args:
            progress: see :data:`Progress`.

        Returns:
            Whether anything had changed.

        Raises:
            UnsupportedIndexError, CorruptIndexError, BuildError: see
                :func:`hybridindex.index.changes.compact.compact`. Everything stays as it was.
        """
        done = self._writer.compact(progress) is not None
        self._following.look()
        return done

    @property
    def n_added(self) -> int:
        """Rows that were added since the lists were written."""
        live = self._ivf.live.current()
        return 0 if live is None or live.added is None else live.added.count

    @property
    def n_live(self) -> int:
        """Rows that searches find; of an index with repeated ids, about."""
        return self.count - self.n_deleted + self.n_added

    @property
    def n_deleted(self) -> int:
        """Ids that were deleted since the lists were written; :attr:`count` counts their rows, too."""
        live = self._ivf.live.current()
        return 0 if live is None or live.deleted is None else len(live.deleted.ids)

    @property
    def attributes(self) -> dict[str, str]:
        """Name and kind of each attribute that conditions (``where=``) may name; empty where there are none.

        Also of attributes that others gave since this was opened: from now on this index has them, too.
        """
        from hybridindex.index.filters.write_attributes import look_again

        look_again(self._ivf)
        stored = self._ivf.rows.attributes
        return {} if stored is None else dict(stored.spec.columns)

    def set_attributes(self, table: Any, ids: Any = None) -> dict[str, str]:
        """Gives the rows attributes, in the place of all earlier ones; open routers see them at their next search.

        Args:
            table: a pyarrow Table or RecordBatch, a DataFrame, or a mapping of names to columns: integers, floats,
                texts, bools, dates and timestamps, lists of texts. Rows that it does not name get missing values.
            ids: (n,) integers, the id of each row of the table; None: 0 .. n - 1.

        Returns:
            :attr:`attributes`.

        Raises:
            InvalidInputError, BuildError, MissingDependencyError: see
            :func:`hybridindex.index.filters.write_attributes.write_attributes`.
        """
        from hybridindex.index.filters.write_attributes import write_attributes

        write_attributes(self._ivf, table, ids)
        return self.attributes

    def remove_attributes(self) -> int:
        """Removes the attributes; returns their bytes.

        Raises:
            BuildError: another process is writing, or something cannot be removed.
        """
        from hybridindex.index.filters.write_attributes import remove_attributes

        return remove_attributes(self._ivf)

    def to_faiss(self, path: str | Path) -> None:
        """Exports a faiss file that holds the same index."""
        from hybridindex.index import to_faiss

        to_faiss(self._ivf, path)

    def snapshot(self, path: str | Path, *, previous: str | Path | None = None) -> Path:
        """Writes a snapshot, an index as it is now, while this one is searched and changed; its path.

        Args:
            path: a new directory, or an empty one.
            previous: an earlier snapshot, whose files are linked where they are the same.

        Raises:
            InvalidInputError, BuildError, DiskFullError: see :func:`hybridindex.index.changes.snapshots.snapshot`.
        """
        from hybridindex.index.changes.snapshots import snapshot as write_snapshot

        return write_snapshot(self.path, path, previous=previous, beside=copy_store).path

    def close(self) -> None:
        """Unmaps the lists, and ends maintenance. Closing twice is harmless."""
        self._following.close()
        self._writer.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _take_over_profiles(ivf: IVFIndex) -> None:
    """After a compaction: lists have heirs."""
    from hybridindex.plans.inherit import try_to_inherit

    with _profiles(ivf.path) as store:
        if store is not None:
            try_to_inherit(ivf, store)


def _profiles(path: Path) -> AbstractContextManager[ControlStore | None]:
    """The control store beside an index, where there is one."""
    from hybridindex.store.control import ControlStore

    file = path / STORE_FILE
    return ControlStore.open(file, required=False) if filesystem.exists(file) else nullcontext()


def build(
    vectors: np.ndarray[Any, Any] | str | Path | VectorFile | Iterable[Any],
    path: str | Path,
    *,
    nlist: int | None = None,
    metric: Metric = "ip",
    codec: str = "flat",
    ids: Any = None,
    attributes: Any = None,
    **options: Any,
) -> Index:
    """Builds an index directory and opens it; see :func:`hybridindex.index.build.build` for all options.

    ``vectors``: an array, a file (docs/inputs.md lists the formats), or an iterator of batches.

    ``attributes``: a record for each vector, in their order; see :meth:`Index.set_attributes`.

    An index that stands at ``path`` is refused without ``replace=True``.
    """
    from hybridindex.index import build as build_index

    table = _checked(attributes)
    if table is None:
        return Index(build_index(vectors, path, nlist=nlist, metric=metric, codec=codec, ids=ids, **options))
    row_ids: Any = None

    def keep_ids(source: VectorSource) -> None:
        nonlocal row_ids
        if len(table) != source.n:
            raise InvalidInputError(
                f"attributes have {len(table)} rows, and there are {source.n} vectors; expected as many"
            )
        row_ids = source.ids(0, source.n)

    built = build_index(vectors, path, nlist=nlist, metric=metric, codec=codec, ids=ids, on_source=keep_ids, **options)
    return _with_attributes(Index(built), table, row_ids)


def copy_store(path: Path, to: Path) -> None:
    """The control store beside an index, its profiles and plans, to a copy of the index."""
    from hybridindex.store.control import ControlStore

    if filesystem.exists(path / STORE_FILE):
        with ControlStore.open(path / STORE_FILE) as store:
            store.copy_to(to / STORE_FILE)


def _checked(attributes: Any) -> Any:
    """Before anything is built."""
    from hybridindex.index.attributes.columns import as_attributes

    return None if attributes is None else as_attributes(attributes)


def _with_attributes(index: Index, table: Any, ids: Any) -> Index:
    try:
        if table is not None:
            index.set_attributes(table, ids)
    except BaseException:
        index.close()
        raise
    return index


def from_faiss(file: Any, path: str | Path, *, attributes: Any = None, ids: Any = None, **options: Any) -> Index:
    """Imports any faiss IVF index, pre-transforms included, and opens it.

    Args:
        attributes: see :meth:`Index.set_attributes`, as ``ids``.
        ids: the id of each row of the attributes; None: 0 .. n - 1.
        file: its path, or an index object, which stays as it is.
        path: the index directory.
        options: see :func:`hybridindex.index.faiss_files.import_faiss.from_faiss`.
    """
    from hybridindex.index import from_faiss as import_index

    table = _checked(attributes)
    return _with_attributes(Index(import_index(file, path, **options)), table, ids)


def open_index(
    path: str | Path,
    *,
    verify: Literal["full", "quick"] = "full",
    write: bool = False,
    durability: Durability = "synced",
) -> Index:
    """Opens an index directory, memory-mapped.

    Args:
        path: the directory.
        write: nobody else may write until it is closed, and lists are written anew by themselves where that pays.
            Without it, each change claims the index for its own time.
        durability: of changes. "synced": on disk when the call returns. "written": with the operating system, so that a
            power cut may take the last ones away, but not the end of the process.
        verify: "full" reads everything once and compares checksums; "quick" checks manifest, sizes and small files.

    Raises:
        CorruptIndexError, UnsupportedIndexError. BuildError: another process writes, or has it open for writing.
    """
    from hybridindex.index import open_index as open_directory

    ivf = open_directory(path, verify=verify)
    try:
        return Index(ivf, write=write, durability=durability)
    except BaseException:
        ivf.close()
        raise


def rollback(path: str | Path, *, force: bool = False) -> int:
    """Makes the generation that the current one replaced the current one again; the number of the generation.

    See :func:`hybridindex.index.opening.rollback`.
    """
    from hybridindex.index import rollback as roll_back

    return roll_back(path, force=force).generation


def restore(snapshot: str | Path, path: str | Path) -> Index:
    """Makes an index of a snapshot, whose every byte is compared with its checksum, and opens it.

    Args:
        snapshot: what :meth:`Index.snapshot` wrote.
        path: a new directory, or an empty one.

    Raises:
        InvalidInputError, CorruptIndexError, BuildError: see :func:`hybridindex.index.changes.snapshots.restore`.
    """
    from hybridindex.index.changes.snapshots import restore as restore_snapshot

    restore_snapshot(snapshot, path, beside=copy_store)
    return open_index(path, verify="quick")


def remove_replaced(path: str | Path) -> list[int]:
    """Removes what was replaced; the numbers of the removed generations. A daemon does it when the new one serves."""
    from hybridindex.index import remove_replaced as remove

    return remove(path)
