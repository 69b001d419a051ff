"""Scan of resident lists on a GPU with our Triton kernels: list-major, each page is read once per batch.

Two phases. The distance of every (query, row) pair goes to the scratch, 4 bytes each, which is little beside the rows;
then each query's best are selected, level by level. Only the (n, k) answer is copied back. The kernels are in
:mod:`hybridindex.tiers.paged.triton_kernels`, their tables in :mod:`hybridindex.tiers.paged.tables.scan_tables`.
Between the two, what filters do not leave is taken out (:mod:`hybridindex.tiers.paged.masks`).
:class:`hybridindex.tiers.paged.torch_scanner.TorchScanner` makes scans that are filtered by ids.
"""

from __future__ import annotations

import importlib.util
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from hybridindex.errors import OutOfBudgetError
from hybridindex.index.codec import DeviceCodec, DeviceKind
from hybridindex.index.filters.row_masks import RowMasks
from hybridindex.tiers.contract.positions import ids_of_positions
from hybridindex.tiers.contract.residency import Residency
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.launch_shapes import (
    LEAST_HEAVY_ROWS,
    MASKED_ROWS,
    Shape,
    heavy_shape,
    light_shape,
    mask_shape,
    selection_shape,
    split_shape,
    split_sizes,
)
from hybridindex.tiers.paged.masks.device_masks import DeviceMasks, PairMasks
from hybridindex.tiers.paged.page_scanner import Candidates, PageScanner
from hybridindex.tiers.paged.tables.scan_tables import ALIGNED, GROUP, Selection, Tile
from hybridindex.tiers.paged.tables.staged_tables import StagedTables, cut_for
from hybridindex.tiers.paged.torch_scanner import TorchScanner
from hybridindex.types import F32, I64

if TYPE_CHECKING:
    import torch

__all__ = ["NEVER", "TABLES", "TritonScanner", "Work", "Workspace"]

#: More members than a stretch has.
NEVER = 1 << 30
#: Members from which a list's inner products are worth a matrix product, padded to GROUP. Below, the multiply-adds of
#: an H200 keep up with its memory: a float32 row has 4 bytes to read for each, a byte code only one. That of float32
#: comes from counts of instructions (ADR 0046); NEVER turns it off.
_HEAVY_FROM = {"f32": 12, "f16": 5, "bf16": 5, "sq8": 3}
#: The tables that every kernel of distances reads, in its order.
TABLES = ("page", "stretch", "first", "groups", "rows", "member", "end", "query", "slot")
#: Of the scratch, what masks of filters may take; and of each pair's tables, what they add, in bytes.
_SHARE_OF_MASKS, _MASK_BYTES_PER_PAIR = 4, 4 * 4
_NOTHING = np.empty(0, dtype=np.float32)
_NO_STREAM = nullcontext()


class TritonScanner(PageScanner):
    """Scans on a GPU. Scans of one arena take turns at its scratch."""

    name = "triton"

    @staticmethod
    def unsupported(arena: PageArena) -> str:
        """Why these kernels cannot serve this arena; empty where they can."""
        if arena.device.type != "cuda":
            return f"{arena.device.type} runs no triton kernels"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed: pip install triton"
        return ""

    def _prepare(self) -> None:
        #: Where the scan runs.
        self.workspace = Workspace.of(self._arena, self._codec, self._scratch_bytes)
        import torch

        kinds = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.int16, "sq8": torch.uint8}
        self._elements = self._arena.data.view(-1).view(kinds[self._codec.kind])

    def _scan(self, queries: F32, probes: I64, coarse_distances: F32, k: int, wanted: Candidates) -> tuple[F32, I64]:
        if wanted is not None:
            return TorchScanner.beside(self)._scan(queries, probes, coarse_distances, k, wanted)
        return self._best(queries, probes, k, None)

    def _scan_masked(
        self, queries: F32, probes: I64, coarse_distances: F32, k: int, masks: RowMasks
    ) -> tuple[F32, I64]:
        parts = [self._best(queries[rows], probes[rows], k, own) for rows, own in self.workspace.in_turn(masks)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def _best(self, queries: F32, probes: I64, k: int, masks: RowMasks | None) -> tuple[F32, I64]:
        n, dim = queries.shape
        keep_max = self._index.metric == "ip"
        distances = np.full((n, k), -np.inf if keep_max else np.inf, dtype=np.float32)
        positions = np.full((n, k), -1, dtype=np.int64)
        scale, offset = self.workspace.constants
        heavy_from = _heavy_from(self._codec.kind, self._arena.geometry.rows_per_page) if keep_max else NEVER
        split_words = split_sizes(dim)[1] if heavy_from < NEVER else 0

        def operands(tile: Tile, tables: Any) -> dict[str, npt.NDArray[Any]]:
            x = queries[tile.first_query : tile.first_query + tile.n_queries]
            centroids = self._index.centroids[tables.stretch_lists()] if self._codec.by_residual else _NOTHING
            return {"x": x, "scale": scale, "offset": offset, "centroids": centroids}

        work = Work(
            elements=(self._elements,),
            keep_max=keep_max,
            heavy_from=heavy_from,
            query_bytes=4 * (dim + split_words),
            split_words=split_words,
            pair_bytes=4 * dim if self._codec.by_residual else 0,
            operands=operands,
            masks=masks,
        )
        found = self.workspace.best(self._residency, self._index.list_sizes, probes, work, distances, positions)
        return distances, ids_of_positions(self._index, positions, complete=found == n * k)


def _heavy_from(kind: DeviceKind, page_rows: int) -> int:
    """Members from which a list is heavy: more where a page has fewer rows than a product."""
    members = _HEAVY_FROM[kind] * -(-LEAST_HEAVY_ROWS // page_rows)
    return members if members <= GROUP else NEVER


@dataclass(slots=True, kw_only=True)
class Work:
    """What one scan asks of its workspace."""

    #: Views of the arena as the kernels read it, flat; bfloat16 as int16.
    elements: tuple[torch.Tensor, ...]
    #: Whether larger is better.
    keep_max: bool
    #: Members from which a stretch is for the heavy kernel.
    heavy_from: int
    #: Bytes of ``operands`` for each query; for each pair at most.
    query_bytes: int
    pair_bytes: int
    #: What the kernels read beside the tables of a tile: arrays of int32 or float32, by name. The second argument is
    #: :attr:`hybridindex.tiers.paged.tables.staged_tables.StagedTables.tables`.
    operands: Callable[[Tile, Any], dict[str, npt.NDArray[Any]]]
    #: Words of the scratch that kernels write of each query; of ``query_bytes``.
    split_words: int = 0
    #: Which rows each query may be answered with; None: all.
    masks: RowMasks | None = None


def _pair_masks(tables: Any, masks: RowMasks) -> tuple[PairMasks, I64]:
    """Of the tile's pairs, and the first slot of each."""
    query, lists, first_row, rows, slots = tables.pairs()
    numbers, of_query = np.unique(masks.of_query, return_inverse=True)
    filters = tuple(masks.filters[number] for number in numbers.tolist())
    return PairMasks(filters, of_query.astype(np.int32)[query], filters[0].first[lists] + first_row, rows), slots


def _merge(distances: F32, positions: I64, more: F32, more_at: I64, keep_max: bool) -> None:
    """The best of both, best first and ties by position, in place; (n, k) each."""
    every, at = np.concatenate((distances, more), axis=1), np.concatenate((positions, more_at), axis=1)
    order = np.lexsort((at, -every if keep_max else every, at < 0), axis=1)[:, : distances.shape[1]]
    distances[:], positions[:] = np.take_along_axis(every, order, 1), np.take_along_axis(at, order, 1)


class Workspace:
    """Scratch, pinned staging and stream of one arena's scans. Thread-safe: scans take turns.

    The scratch is taken once and whole: a device allocation that comes and goes would disturb an LLM beside us. It goes
    when the arena's memory does, so nothing here may hold on to that.
    """

    #: By the identity of the arena's tensor; an entry leaves with the tensor.
    _made: ClassVar[dict[int, Workspace]] = {}
    _making: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def of(cls, arena: PageArena, codec: DeviceCodec, scratch_bytes: int) -> Workspace:
        """The arena's workspace, made at the first call and anew for another scratch.

        Raises:
            OutOfBudgetError: the device has no room for the scratch now.
        """
        with cls._making:
            key = id(arena.data)
            made = cls._made.get(key)
            if made is not None and made.scratch_bytes == scratch_bytes:
                return made
            # The old scratch goes first, with the scans that read it: the device may have no room for both.
            cls._made.pop(key, None)
            del made
            made = cls(arena, codec, scratch_bytes)
            weakref.finalize(arena.data, cls._made.pop, key, None).atexit = False
            cls._made[key] = made
            return made

    @classmethod
    def drop(cls, arena: PageArena) -> None:
        """Lets the arena's workspace go, if there is one."""
        with cls._making:
            cls._made.pop(id(arena.data), None)

    def __init__(self, arena: PageArena, codec: DeviceCodec, scratch_bytes: int) -> None:
        """Takes the scratch.

        Raises:
            OutOfBudgetError: the device has no room for it.
        """
        import torch

        self.scratch_bytes = scratch_bytes
        self._codec = codec
        self._device = arena.device
        self._on_cuda = arena.device.type == "cuda"
        self._rows_per_page = arena.geometry.rows_per_page
        self._lock = threading.Lock()
        words = scratch_bytes // 128 * 32
        try:
            self._ints = torch.empty(words, dtype=torch.int32, device=self._device)
        except torch.OutOfMemoryError as error:
            raise OutOfBudgetError(
                f"device {self._device} has no room for scratch of {scratch_bytes:,} bytes: {error}"
            ) from error
        self._floats, self._keys = self._ints.view(torch.float32), self._ints.view(torch.int64)
        self._halves = self._ints.view(torch.int16)
        #: Of its words, those for tables, distances and candidates; behind them lie masks, once there was one.
        self._n_words = self._all_words = words
        self._masks: DeviceMasks | None = None
        #: Host memory of scans that are over.
        self._idle: list[StagedTables] = []
        self._stream: Any = None
        if self._on_cuda:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            # The scratch may be memory that a former owner's kernels, queued on this thread's stream, still use.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        #: What was compiled for this device, by kernel and constants.
        self._compiled: dict[tuple[Any, ...], Any] = {}
        #: Constants and options of kernels, as this workspace launches them.
        self._shapes: dict[Any, Shape] = {}
        #: (2, dim) float32 scale and offset of sq8; empty for other codecs.
        self.constants: F32 = np.stack((codec.scale, codec.offset))

    def best(
        self, residency: Residency, list_sizes: I64, probes: I64, work: Work, distances: F32, positions: I64
    ) -> int:
        """Puts the best of each query into ``distances`` and packed ``positions`` (n, k), which come as empty places;
        says how many of these it filled, or fewer where there were several tiles.

        Rows as far as others are kept in the order of the probes.

        Raises:
            OutOfBudgetError: the scratch is too small for one query at this k.
        """
        pair_bytes = work.pair_bytes + (0 if work.masks is None else _MASK_BYTES_PER_PAIR)
        room = self.scratch_bytes - 4 * (self._all_words - self._n_words) - 4 * self.constants.size
        cut = cut_for(distances.shape[1], room, work.query_bytes, pair_bytes, self._rows_per_page, list_sizes)
        try:
            staged = self._idle.pop()
        except IndexError:
            staged = StagedTables(self._rows_per_page, page_locked=self._on_cuda)
        tables, start, filled = staged.tables, 0, 0
        tables.take(probes, list_sizes, cut.pages)
        for end in tables.tiles(*cut.costs):
            tile = staged.write(start, end, residency, work.heavy_from, cut.selection)
            keys = self.scan(staged, tile, cut.selection, work)
            own = slice(tile.first_query, tile.first_query + tile.n_queries)
            if start:
                more = np.empty_like(distances[own]), np.empty_like(positions[own])
                tables.answers(keys, work.keep_max, *more)
                _merge(distances[own], positions[own], *more, work.keep_max)
                filled = 0
            else:
                filled = tables.answers(keys, work.keep_max, distances[own], positions[own])
            start = end
        # Of a scan that failed, the device may still read what it has.
        self._idle.append(staged)
        return filled

    def in_turn(self, masks: RowMasks) -> Iterator[tuple[slice, RowMasks]]:
        """Queries to scan one part after the other, so that the device can hold the masks of each. The scratch gives
        room for masks when it is asked for the first time.

        Raises:
            OutOfBudgetError: there is not even room for one.
        """
        with self._lock:
            if self._masks is None:
                words = len(self._ints)
                room = DeviceMasks.room(words // _SHARE_OF_MASKS, masks.filters[0])
                if not room:
                    raise OutOfBudgetError(
                        f"scratch of {self.scratch_bytes:,} bytes is too small for a filter of "
                        f"{masks.filters[0].mask.nbytes:,} bytes"
                    )
                self._n_words = words - room
                self._masks = DeviceMasks(self._ints[self._n_words :], self._n_words, masks.filters[0])
            at_once = len(self._masks)
        for rows in masks.runs(at_once):
            yield rows, masks.take(rows)

    def scan(self, staged: StagedTables, tile: Tile, selection: Selection, work: Work) -> npt.NDArray[np.int64]:
        """Keys of the best of each query of a staged tile: (n, kept) int64, in any order, in memory of ``staged``.

        Scans take turns to queue what the device does; they wait for it side by side.
        """
        at = dict(zip(TABLES, tile.at, strict=True))
        used = staged.put(tile.used, work.operands(tile, staged.tables), at)
        with self._lock, self._on_stream():
            masks = None
            if work.masks is not None:
                assert self._masks is not None
                masks, at_slots = _pair_masks(staged.tables, work.masks)
                used = staged.put(used, {"mask_slot": at_slots, **self._masks.operands(masks)}, at)
            self._upload(staged, used, tile, at, work.split_words)
            self.launch(work.elements, tile, at, work.keep_max)
            if masks is not None:
                self._leave_out(at, masks)
            answer = self.select(at, tile, selection, work.keep_max)
            self._begin_fetch(staged, answer, tile.n_queries * selection.kept)
        return self._end_fetch(staged, tile.n_queries * selection.kept).reshape(-1, selection.kept)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Of one scan: others wait. What it queues goes to the workspace's stream."""
        with self._lock, self._on_stream():
            yield

    def _on_stream(self) -> AbstractContextManager[Any]:
        """What this thread queues goes to the workspace's stream."""
        if not self._on_cuda:
            return _NO_STREAM
        import torch

        # Of its device, too.
        return torch.cuda.stream(self._stream)

    def _upload(self, staged: StagedTables, used: int, tile: Tile, at: dict[str, int], split_words: int) -> None:
        """Queues the copy of ``used`` staged words, and says in ``at`` what follows them."""
        at["parts"] = used
        at["out"] = out = used + tile.n_queries * split_words
        # Where the selection puts keys, level by level, in two places that take turns; in keys.
        at["best"] = best = (out + _aligned(tile.n_slots) + 31) // 32 * ALIGNED
        at["better"] = end = best + _aligned(tile.places[1])
        if len(tile.places) > 2:
            end += tile.places[2]
        if 2 * end > self._n_words:
            # Cut before another scan's masks took their room.
            raise OutOfBudgetError(f"scratch of {4 * self._n_words:,} bytes is too small for {8 * end:,}")
        self._ints[:used].copy_(staged.block[:used], non_blocking=True)

    def _leave_out(self, at: dict[str, int], masks: PairMasks) -> None:
        """Queues that rows which masks do not leave become no candidates."""
        where = [at[name] for name in ("mask_slot", "mask_rows", "mask_word", "mask_bit", "out")]
        grid = (len(masks.rows), -(-int(masks.rows.max()) // MASKED_ROWS), 1)
        self._run(self._shape("mask", mask_shape), grid, (self._ints, self._floats, *where))

    def launch(self, elements: tuple[torch.Tensor, ...], tile: Tile, at: dict[str, int], keep_max: bool) -> None:
        """Queues the distances of an uploaded tile."""
        tensors, of_rows = (*elements, self._ints, self._floats), (self._codec, self._rows_per_page)
        tables = [at[name] for name in TABLES]
        if tile.n_light:
            where = [at[name] for name in ("x", "scale", "offset", "centroids", "out")]
            shape = self._shape(("light", keep_max), light_shape, *of_rows, keep_max)
            self._run(shape, (tile.n_light, 1, 1), (*tensors, *tables, *where))
        if n_heavy := tile.n_items - tile.n_light:
            where = [at[name] for name in ("x", "scale", "offset", "parts")]
            shape = self._shape("split", split_shape, self._codec)
            self._run(shape, (tile.n_queries, 1, 1), (self._floats, self._halves, *where))
            where = [at[name] for name in ("x", "centroids", "parts", "out")]
            shape = self._shape("heavy", heavy_shape, *of_rows, self._on_cuda)
            self._run(shape, (n_heavy, 1, 1), (*tensors, self._halves, tile.n_light, *tables, *where))

    def _shape(self, key: Any, make: Callable[..., Shape], *args: Any) -> Shape:
        """What ``make(*args)`` says, asked once."""
        found = self._shapes.get(key)
        return self._shapes.setdefault(key, make(*args)) if found is None else found

    def _run(self, shape: Shape, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        """Launches a kernel.

        A kernel that is asked by its source looks at every argument to find what it was compiled to: three times the
        rest of a launch. All that triton compiles for is in the constants here, since pointers and offsets are
        multiples of 16 and ``first_item`` is any number.
        """
        key = shape.key
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*args, *shape.values)
            return
        compiled = shape.kernel[grid](*args, **shape.constants, **shape.options)
        # Triton's interpreter has nothing to keep.
        if compiled is not None:
            self._compiled[key] = compiled

    def select(self, at: dict[str, int], tile: Tile, selection: Selection, keep_max: bool) -> int:
        """Queues the selection, level by level; where the answer lies, in keys."""
        places = at["best"], at["better"]
        source = at["out"]
        for level, programs in enumerate(tile.programs):
            target = places[level % 2]
            key = level == 0, keep_max, selection
            shape = self._shape(key, selection_shape, *key)
            args = (
                self._ints, self._floats, self._keys,
                source, tile.starts[level], tile.starts[level + 1], target,
            )  # fmt: skip
            self._run(shape, (tile.n_queries, programs, 1), args)
            source = target
        return source

    def _begin_fetch(self, staged: StagedTables, at: int, count: int) -> None:
        """Queues the copy of an answer."""
        staged.keys(count)[0].copy_(self._keys[at : at + count], non_blocking=True)
        if self._on_cuda:
            import torch

            if staged.done is None:
                staged.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            staged.done.record(self._stream)

    def _end_fetch(self, staged: StagedTables, count: int) -> npt.NDArray[np.int64]:
        """Waits for it."""
        if staged.done is not None:
            staged.done.synchronize()
        return staged.keys(count)[1]


def _aligned(n: int) -> int:
    return -(-n // ALIGNED) * ALIGNED
