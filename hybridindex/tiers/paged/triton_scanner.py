"""Scan of resident lists on a GPU with our Triton kernels: list-major, each page is read once per batch.

Two phases. The distance of every (query, row) pair goes to the scratch, 4 bytes each, which is little beside the rows;
then each query's best are selected, level by level. Only the (n, k) answer is copied back. The kernels are in
:mod:`hybridindex.tiers.paged.triton_kernels`, their tables in :mod:`hybridindex.tiers.paged.scan_tables`.
Between the two, what filters do not leave is taken out (:mod:`hybridindex.tiers.paged.masks`).
:class:`hybridindex.tiers.paged.torch_scanner.TorchScanner` makes scans that are filtered by ids.
"""

from __future__ import annotations

import importlib.util
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from hybridindex.errors import OutOfBudgetError
from hybridindex.index.codec import DeviceCodec
from hybridindex.index.filters.row_masks import RowMasks
from hybridindex.tiers.contract.positions import ids_of_positions
from hybridindex.tiers.contract.residency import Residency
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.masks.device_masks import DeviceMasks, PairMasks
from hybridindex.tiers.paged.page_scanner import Candidates, PageScanner
from hybridindex.tiers.paged.scan_tables import (
    GROUP,
    Cutting,
    ItemTables,
    Pairs,
    Selection,
    make_tables,
    pairs_of_probes,
)
from hybridindex.tiers.paged.torch_scanner import TorchScanner
from hybridindex.types import F32, I64

if TYPE_CHECKING:
    import torch

__all__ = ["NEVER", "TABLES", "TritonScanner", "Work", "Workspace"]

#: More members than a stretch has.
NEVER = 1 << 30
#: Members from which a list's inner products are worth a matrix product, padded to GROUP. Below, the multiply-adds of
#: an H200 keep up with its memory: a float32 row has 4 bytes to read for each, a byte code only one.
_HEAVY_FROM = {"f32": NEVER, "f16": 5, "bf16": 5, "sq8": 3}
#: float32 values of decoded rows that one thread of the 128 keeps in registers, and rows that a program holds at most.
_VALUES_PER_THREAD = 96
_THREADS = 128
_MAX_ROWS = 64
#: Registers of a light program's thread: four programs fit a multiprocessor of 65,536 then, instead of two or three,
#: and all their loads are in flight together. At 384 and 768 dimensions hardly a value leaves the registers for it.
_LIGHT_REGISTERS = 128
#: The tables that every kernel of distances reads, in its order.
TABLES = ("page", "stretch", "first", "groups", "rows", "member", "end", "query", "slot")
#: Elements that a section of the scratch is aligned to; triton then reads it in 16-byte pieces.
_ALIGNED = 16
#: Of the scratch, what masks of filters may take; and of each pair's tables, what they add, in bytes.
_SHARE_OF_MASKS, _MASK_BYTES_PER_PAIR = 4, 4 * 4
#: Rows of a program that leaves rows out.
_MASKED_ROWS = 512


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
        constants = self.workspace.constants

        def operands(tables: ItemTables, _pairs: Pairs) -> dict[str, npt.NDArray[Any]]:
            rows = slice(tables.first_query, tables.first_query + tables.n_queries)
            centroids = self._index.centroids[tables.list] if self._codec.by_residual else np.empty((0, 0), np.float32)
            return {"x": queries[rows], "scale": constants[:1], "offset": constants[1:], "centroids": centroids}

        work = Work(
            elements=(self._elements,),
            keep_max=keep_max,
            heavy_from=_HEAVY_FROM[self._codec.kind] if keep_max else NEVER,
            query_bytes=4 * dim,
            pair_bytes=4 * dim if self._codec.by_residual else 0,
            operands=operands,
            masks=masks,
        )
        self.workspace.best(self._residency, self._index.list_sizes, probes, work, distances, positions)
        return distances, ids_of_positions(self._index, positions)


@dataclass(frozen=True, slots=True, kw_only=True)
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
    #: What the kernels read beside the tables of a tile of pairs: arrays of int32 or float32, by name.
    operands: Callable[[ItemTables, Pairs], dict[str, npt.NDArray[Any]]]
    #: Which rows each query may be answered with; None: all.
    masks: RowMasks | None = None


def _answers(keys: I64, tables: ItemTables, pairs: Pairs, keep_max: bool) -> tuple[F32, I64]:
    """Distances and packed positions (list id << 32 | row in list) of (n, kept) keys; -1 in empty places."""
    ordered = (keys >> 32).astype(np.int32)
    values = (ordered ^ ((ordered >> 31) & np.int32(0x7FFFFFFF))).view(np.float32)
    empty = keys == np.iinfo(np.int64).max
    slot = np.where(empty, 0, keys & 0xFFFFFFFF)
    pair = np.searchsorted(tables.pair_slot, slot, side="right") - 1
    row = pairs.first_row[pair] + slot - tables.pair_slot[pair]
    positions = np.where(empty, -1, pairs.list[pair] << 32 | row)
    distances = np.where(empty, np.float32(np.inf), values)
    return (-distances if keep_max else distances), positions


def _pair_masks(pairs: Pairs, masks: RowMasks) -> PairMasks:
    numbers, of_query = np.unique(masks.of_query, return_inverse=True)
    filters = tuple(masks.filters[number] for number in numbers.tolist())
    first_bit = filters[0].first[pairs.list] + pairs.first_row
    return PairMasks(filters, of_query.astype(np.int32)[pairs.query], first_bit, pairs.rows)


def _merge(distances: F32, positions: I64, more: F32, more_at: I64, keep_max: bool) -> None:
    """The best of both, best first and ties by position, in place; (k,) and (m,)."""
    every, at = np.concatenate((distances, more)), np.concatenate((positions, more_at))
    order = np.lexsort((at, -every if keep_max else every, at < 0))[: len(distances)]
    distances[:], positions[:] = every[order], at[order]


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
        """The arena's workspace, made at the first call and anew for another scratch."""
        with cls._making:
            key = id(arena.data)
            made = cls._made.get(key)
            if made is None:
                weakref.finalize(arena.data, cls._made.pop, key, None).atexit = False
            if made is None or made.scratch_bytes != scratch_bytes:
                made = cls._made[key] = cls(arena, codec, scratch_bytes)
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
        #: Of its words, those for tables, distances and candidates; behind them lie masks, once there was one.
        self._n_words = words
        self._masks: DeviceMasks | None = None
        self._stage(4096)
        self._result = self._host_words(4096)
        self._stream: Any = None
        if self._on_cuda:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            # The scratch may be memory that a former owner's kernels, queued on this thread's stream, still use.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        #: What was compiled for this device, by kernel and constants.
        self._compiled: dict[tuple[Any, ...], Any] = {}
        #: (2, dim) float32 scale and offset of sq8; empty for other codecs.
        self.constants: F32 = np.stack((codec.scale, codec.offset))

    @property
    def _on_cuda(self) -> bool:
        return self._device.type == "cuda"

    def _host_words(self, n: int) -> torch.Tensor:
        import torch

        return torch.empty(n, dtype=torch.int32, pin_memory=self._on_cuda)

    def _stage(self, n: int) -> None:
        """Takes host memory for tables of ``n`` words, seen as whole numbers and as float32."""
        self._staging = self._host_words(n)
        self._staged_ints: npt.NDArray[np.int32] = self._staging.numpy()
        self._staged_floats = self._staged_ints.view(np.float32)

    def best(
        self, residency: Residency, list_sizes: I64, probes: I64, work: Work, distances: F32, positions: I64
    ) -> None:
        """Puts the best of each query into ``distances`` and packed ``positions`` (n, k), which come as empty places.

        Rows as far as others are kept in the order of the probes.

        Raises:
            OutOfBudgetError: the scratch is too small for one query at this k.
        """
        k = distances.shape[1]
        of_masks = len(self._ints) - self._n_words
        cutting = Cutting(
            selection=Selection.of(k),
            room=self.scratch_bytes - 4 * of_masks - 4 * self.constants.size,
            query_bytes=work.query_bytes,
            pair_bytes=work.pair_bytes + (0 if work.masks is None else _MASK_BYTES_PER_PAIR),
            rows_per_page=self._rows_per_page,
            longest_list=int(list_sizes.max()),
        )
        pages = cutting.longest_stretch(k)
        every = pairs_of_probes(probes, list_sizes, cutting.rows_per_page, pages)
        for start, end in cutting.tiles(every):
            pairs = every.part(start, end)
            tables = make_tables(pairs, residency.list_log, residency.page_log, cutting.rows_per_page, work.heavy_from)
            tile = (work.elements, tables, cutting.selection, work.operands(tables, pairs), work.keep_max)
            keys = self.scan(*tile) if work.masks is None else self.scan(*tile, _pair_masks(pairs, work.masks))
            found, at = _answers(keys, tables, pairs, work.keep_max)
            rows = slice(tables.first_query, tables.first_query + tables.n_queries)
            if positions[rows.start, 0] >= 0:
                # The query was begun by the tile before.
                _merge(distances[rows.start], positions[rows.start], found[0], at[0], work.keep_max)
                rows, found, at = slice(rows.start + 1, rows.stop), found[1:], at[1:]
            distances[rows], positions[rows] = found[:, :k], at[:, :k]

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

    def scan(
        self,
        elements: tuple[torch.Tensor, ...],
        tables: ItemTables,
        selection: Selection,
        operands: dict[str, npt.NDArray[Any]],
        keep_max: bool,
        masks: PairMasks | None = None,
    ) -> npt.NDArray[np.int64]:
        """Keys of the best of each query of a tile: (n, kept) int64, ascending. Arguments as in :class:`Work`;
        ``masks``: of the tile's pairs."""
        starts = selection.starts(tables.query_slot)
        with self.turn():
            if masks is not None:
                assert self._masks is not None
                operands = {**operands, "mask_slot": tables.pair_slot, **self._masks.operands(masks)}
            at = self._upload(tables, starts, operands)
            self.launch(elements, tables, at, keep_max)
            if masks is not None:
                self._leave_out(at, masks)
            answer = self.select(at, starts, selection, tables.n_queries, keep_max)
            keys = self._fetch(answer, tables.n_queries * selection.kept).reshape(-1, selection.kept)
        keys.sort(axis=1)
        return keys

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Of one scan: others wait. What it queues goes to the workspace's stream."""
        with self._lock, ExitStack() as stack:
            if self._on_cuda:
                import torch

                stack.enter_context(torch.cuda.device(self._device))
                stack.enter_context(torch.cuda.stream(self._stream))
            yield

    def _upload(self, tables: ItemTables, starts: list[I64], operands: dict[str, npt.NDArray[Any]]) -> dict[str, int]:
        """Writes all tables in one copy; where each begins, in words, and what follows them."""
        sections: dict[str, npt.NDArray[Any]] = {
            "page": tables.page,
            "stretch": tables.stretch,
            "first": tables.first_item,
            "groups": tables.groups,
            "rows": tables.rows,
            "member": tables.member,
            "end": tables.member_end,
            "query": tables.query,
            "slot": tables.slot,
            **{f"starts{level}": values for level, values in enumerate(starts)},
            **operands,
        }
        at: dict[str, int] = {}
        used = 0
        for name, values in sections.items():
            at[name] = used
            used += _aligned(values.size)
        at["out"] = used
        # Where the selection puts keys, level by level, in two places that take turns; in keys.
        at["best"] = -(-(used + _aligned(tables.n_slots)) // 32) * _ALIGNED
        at["better"] = at["best"] + _aligned(int(starts[1][-1]))
        end = at["better"] + (int(starts[2][-1]) if len(starts) > 2 else 0)
        if 2 * end > self._n_words:
            # Cut before another scan's masks took their room.
            raise OutOfBudgetError(f"scratch of {4 * self._n_words:,} bytes is too small for {8 * end:,}")
        if len(self._staging) < used:
            self._stage(1 << (used - 1).bit_length())
        for name, values in sections.items():
            target = self._staged_floats if values.dtype == np.float32 else self._staged_ints
            target[at[name] : at[name] + values.size] = values.reshape(-1)
        self._ints[:used].copy_(self._staging[:used], non_blocking=True)
        return at

    def _leave_out(self, at: dict[str, int], masks: PairMasks) -> None:
        """Queues that rows which masks do not leave become no candidates."""
        from hybridindex.tiers.paged.masks import triton_mask_kernel

        where = [at[name] for name in ("mask_slot", "mask_rows", "mask_word", "mask_bit", "out")]
        grid = (len(masks.rows), -(-int(masks.rows.max()) // _MASKED_ROWS), 1)
        constants = {"BLOCK": _MASKED_ROWS}
        self._run(triton_mask_kernel.leave_out, grid, (self._ints, self._floats, *where), constants, {"num_warps": 4})

    def launch(
        self, elements: tuple[torch.Tensor, ...], tables: ItemTables, at: dict[str, int], keep_max: bool
    ) -> None:
        """Queues the distances of uploaded tables."""
        from hybridindex.tiers.paged import triton_kernels

        dim, kind = self._codec.dim, self._codec.kind
        where = [at[name] for name in (*TABLES, "x", "scale", "offset", "centroids", "out")]
        shape = {
            "D": dim,
            "PAGE_ROWS": self._rows_per_page,
            "GROUP": GROUP,
            "KIND": kind,
            "RESIDUAL": self._codec.by_residual,
        }
        tensors = (*elements, self._ints, self._floats)
        if tables.n_light:
            cols = _columns(dim)
            block = {"ROWS": _rows_at_once(dim, cols, self._rows_per_page), "COLS": cols}
            constants = {**shape, "KEEP_MAX": keep_max, **block}
            options = {"num_warps": _THREADS // 32, "maxnreg": _LIGHT_REGISTERS}
            self._run(triton_kernels.scan_light, (tables.n_light, 1, 1), (*tensors, *where), constants, options)
        if n_heavy := len(tables.page) - tables.n_light:
            block = {"ROWS": 64, "COLS": 32 if kind == "f32" else 64}
            constants = {**shape, "WIDE": not self._on_cuda, **block}
            args = (*tensors, tables.n_light, *where)
            self._run(triton_kernels.scan_heavy, (n_heavy, 1, 1), args, constants, {"num_warps": 4})

    def _run(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        args: tuple[Any, ...],
        constants: dict[str, Any],
        options: dict[str, int],
    ) -> None:
        """Launches ``kernel``. ``constants``: its last parameters, in their order; ``options``: always the same with
        them.

        A kernel that is asked by its source looks at every argument to find what it was compiled to: three times the
        rest of a launch. All that triton compiles for is in the constants here, since pointers and offsets are
        multiples of 16 and ``first_item`` is any number.
        """
        key = (kernel, *constants.values())
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*args, *constants.values())
            return
        compiled = kernel[grid](*args, **constants, **options)
        # Triton's interpreter has nothing to keep.
        if compiled is not None:
            self._compiled[key] = compiled

    def select(
        self, at: dict[str, int], starts: list[I64], selection: Selection, n_queries: int, keep_max: bool
    ) -> int:
        """Queues the selection, level by level; where the answer lies, in keys."""
        from hybridindex.tiers.paged import triton_kernels

        places = at["best"], at["better"]
        source = at["out"]
        for level in range(len(starts) - 1):
            target = places[level % 2]
            # Every search waits for these lines: no np.diff.
            most = int((starts[level][1:] - starts[level][:-1]).max())
            chunks = max(1, -(-most // selection.chunk))
            constants = {
                "FROM_DISTANCES": level == 0,
                "KEEP_MAX": keep_max,
                "CHUNK": selection.chunk,
                "KEPT": selection.kept,
            }
            args = (
                self._ints, self._floats, self._keys,
                source, at[f"starts{level}"], at[f"starts{level + 1}"], target,
            )  # fmt: skip
            warps = 4 if selection.chunk <= 2048 else 8
            self._run(triton_kernels.select_best, (n_queries, chunks, 1), args, constants, {"num_warps": warps})
            source = target
        return source

    def _fetch(self, at: int, count: int) -> npt.NDArray[np.int64]:
        import torch

        if not self._on_cuda:
            keys: npt.NDArray[np.int64] = self._keys[at : at + count].numpy().copy()
            return keys
        if len(self._result) < 2 * count:
            self._result = self._host_words(1 << (2 * count - 1).bit_length())
        result = self._result.view(torch.int64)[:count]
        result.copy_(self._keys[at : at + count], non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        done.synchronize()
        return result.numpy().copy()


def _aligned(n: int) -> int:
    return -(-n // _ALIGNED) * _ALIGNED


def _columns(dim: int) -> int:
    """Elements of a row that are taken together: at most 64, so that a query's are fewer than the threads (triton then
    loads them where they are needed), and such that little of the last piece is empty."""
    for cols in (64, 32, 16):
        if -dim % cols <= dim // 8:
            return cols
    return 8


def _rows_at_once(dim: int, cols: int, rows_per_page: int) -> int:
    """Rows that a light item holds in registers: a power of two."""
    padded = -(-dim // cols) * cols
    fitting = max(1, _VALUES_PER_THREAD * _THREADS // padded)
    return min(_MAX_ROWS, 1 << (fitting.bit_length() - 1), 1 << (rows_per_page - 1).bit_length())
