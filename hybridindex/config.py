"""What a router and a search are told: frozen values, checked when they are made.

:class:`RouterConfig` is contained in the configuration of the daemon, of the vLLM plugin and of ``chat``. Each field
describes itself by a :class:`Setting`; command line options, the settings file and docs/settings.md are made from that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypedDict, cast

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.types import I64

__all__ = [
    "MAX_BATCH_QUERIES",
    "MAX_CANDIDATES",
    "MAX_K",
    "HealthPolicy",
    "HostScannerName",
    "PrecisionName",
    "RouterConfig",
    "RouterOptions",
    "RouterSettings",
    "RowsName",
    "SearchParams",
    "Setting",
    "check_bytes",
    "check_count",
    "check_ids",
    "check_milliseconds",
    "check_number",
    "check_one_of",
    "check_whole",
    "parse_bytes",
]

#: Largest k. faiss-gpu's limit; the same for every tier, so that answers do not depend on placement.
MAX_K = 2048
#: Most queries of one search call.
MAX_BATCH_QUERIES = 65_536

#: Most candidates of a search by codes.
MAX_CANDIDATES = 65_536

#: Of int64.
_MOST_ID = (1 << 63) - 1

#: ``auto``: native where it supports the index, else faiss.
HostScannerName = Literal["auto", "native", "faiss"]
#: ``auto``: with devices and a plan what the plan is of, rows or codes; else the codes, where the index has some,
#: ``host_scanner`` is not ``faiss``, the extension is there, and few of the rows are candidates; else the rows.
PrecisionName = Literal["auto", "codes", "rows"]
#: ``auto``: a GPU, where it is faster than the host.
CoarseQuantizationName = Literal["auto", "host", "device"]
#: Where rows are kept while codes are scanned.
RowsName = Literal["resident", "mapped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a field is set outside Python. Goes into the field's ``Annotated`` type."""

    help: str
    #: Option of the command line; default the field's name.
    flag: str | None = None
    #: Whether sizes such as "2GiB" are taken, too.
    is_bytes: bool = False
    metavar: str | None = None


# Checks of single values. Each names the field, its value and what would be right.


def _is_integer(value: Any) -> bool:
    """numpy's integers are."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def _finite(value: Any) -> bool:
    """An integer above all floats is not."""
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


def check_count(name: str, value: Any, limit: int) -> int:
    """An integer 1..limit."""
    if type(value) is int and 1 <= value <= limit:  # what nearly all searches give
        return value
    if not _is_integer(value):
        raise InvalidInputError(f"{name} is {value!r}; expected an integer 1..{limit}")
    if not 1 <= value <= limit:
        raise InvalidInputError(f"{name} is {value}; expected 1..{limit}")
    return int(value)


def _check_integer(name: str, value: Any) -> int:
    if not _is_integer(value):
        raise InvalidInputError(f"{name} is {value!r}; expected an integer")
    return int(value)


def check_whole(name: str, value: Any, low: int, high: int) -> int:
    """An integer low..high."""
    if not _is_integer(value) or not low <= value <= high:
        raise InvalidInputError(f"{name} is {value!r}; expected an integer {low}..{high}")
    return int(value)


def check_bytes(name: str, value: Any) -> int:
    """An integer, 0 or more."""
    if not _is_integer(value) or value < 0:
        raise InvalidInputError(f"{name} is {value!r}; expected whole bytes, 0 or more")
    return int(value)


def check_number(name: str, value: Any, high: float) -> float:
    """A number above 0, at most ``high``."""
    if not (_finite(value) and 0 < value <= high):
        raise InvalidInputError(f"{name} is {value!r}; expected a number above 0, at most {high:g}")
    return float(value)


def check_milliseconds(name: str, value: Any) -> float:
    """A finite number above 0."""
    if not (_finite(value) and value > 0):
        raise InvalidInputError(f"{name} is {value!r}; expected a positive number of milliseconds")
    return float(value)


def check_one_of(name: str, value: Any, choices: Sequence[str]) -> None:
    """One of some words."""
    if value not in choices:
        *first, last = map(repr, choices)
        raise InvalidInputError(f"{name} is {value!r}; expected {', '.join(first)} or {last}")


#: Of a size; more do not fit a float.
_MAX_DIGITS = 30
_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**e for e, p in enumerate("KMGT", 1)}}
_UNITS |= {f"{p}IB": 1024**e for e, p in enumerate("KMGT", 1)} | {p: 1024**e for e, p in enumerate("KMGT", 1)}


def parse_bytes(text: str) -> int:
    """ "2GiB", "512 MB", "1.5G" (binary) or plain bytes.

    Raises:
        InvalidInputError: not a size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS or len(match[1]) > _MAX_DIGITS:
        raise InvalidInputError(
            f"size is {text!r}; expected bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB, TB"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


# Values


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPolicy:
    """When a device is too slow to be used, and whether one that had no room is tried again.

    A scan is *late* when the device took longer than the host took for its own part of the batch, plus ``slow_factor``
    times what the host would have taken for the device's part, plus ``slow_margin_ms``.
    """

    #: The stand-in scans on the host's own cores and is slower whenever these are busy.
    judge: Annotated[
        Literal["gpus", "all", "none"],
        Setting(help="Devices that are not used while they are slow. 'gpus': all but the stand-in."),
    ] = "gpus"
    slow_factor: Annotated[
        float, Setting(help="A device's scan is late after this many times the host's own time for it.")
    ] = 2.0
    slow_margin_ms: Annotated[float, Setting(help="Milliseconds added to that.")] = 10.0
    slow_parts: Annotated[
        int,
        Setting(
            help="A device is slow once it has this many more late scans than scans in time, if the host then "
            "proves faster."
        ),
    ] = 32
    #: Longer than a kernel takes to compile for a k that nobody asked for before.
    stuck_s: Annotated[
        float,
        Setting(
            help="Seconds after which a scan counts as stuck (on top of slow_factor times the host's own time); "
            "when it closes, the router waits as long for any device."
        ),
    ] = 10.0
    retry_open: Annotated[
        bool,
        Setting(
            help="Try again to open a device that had too little free memory at the start; it takes its budget "
            "when there is room. False: it counts as failed until the router is opened anew."
        ),
    ] = True

    def __post_init__(self) -> None:
        check_one_of("judge", self.judge, ("gpus", "all", "none"))
        for name, least in (("slow_factor", 1.0), ("slow_margin_ms", 0.0), ("slow_parts", 1.0), ("stuck_s", 1e-3)):
            value = getattr(self, name)
            if not (_finite(value) and value >= least):
                raise InvalidInputError(f"{name} is {value!r}; expected a number of at least {least:g}")
        _check_flag(self, "retry_open")

    def judges(self, *, stand_in: bool) -> bool:
        """Whether a device's scans are judged; ``stand_in``: it is the stand-in in RAM."""
        return self.judge == "all" or (self.judge == "gpus" and not stand_in)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """All that a router can be told, beside its index and plan.

    Raises:
        InvalidInputError: names the field, its value and what would be right.
    """

    devices: Annotated[
        tuple[str, ...],
        Setting(
            help="cuda:N, or cpu for the stand-in device in RAM; none: the host scans everything. Naming a device "
            "again opens another arena there, with its own budget.",
            flag="--device",
        ),
    ] = ()
    device_budget_bytes: Annotated[
        int | tuple[int, ...] | None,
        Setting(
            help="Most bytes per device, temporary buffers included: one value for all, or one each; default: the "
            "plan's.",
            flag="--budget",
            is_bytes=True,
        ),
    ] = None
    lookahead_bytes: Annotated[
        int | None,
        Setting(
            help="Bytes of each budget that are reserved for sessions. Default: what can be copied in window_ms at "
            "the bandwidth that the plan's profile measured, or 256 MiB if it measured none; never more than "
            "the plan's lists leave. No effect where lists are in shards, for codecs that only faiss scans.",
            is_bytes=True,
        ),
    ] = None
    window_ms: Annotated[
        float | None,
        Setting(
            help="Milliseconds of generation that can hide a session's copies, if the session gives no window, "
            "step or bytes; default: the longest step that profile llm measured."
        ),
    ] = None
    lookahead_queue_bytes: Annotated[
        int,
        Setting(
            help="Most bytes of drafts that wait for their lists to be copied. Beyond it, the oldest draft of the "
            "key with the most waiting bytes is dropped and counted.",
            is_bytes=True,
        ),
    ] = 16 << 20
    max_batch: Annotated[
        int | None,
        Setting(
            help="Most queries of one batch; default: all that wait, while queries times the largest of nprobe, k "
            "and candidates is at most 1,048,576 (a small cap causes backlogs)."
        ),
    ] = None
    threads: Annotated[int | None, Setting(help="Host threads per scan; default: faiss's own.")] = None
    early_dispatch: Annotated[
        bool, Setting(help="Answer a request as soon as its own queries are done, not with its batch.")
    ] = True
    host_scanner: Annotated[
        HostScannerName,
        Setting(
            help="What scans on the host. 'auto': native if it supports the codec, else faiss. Answers are the "
            "same except for pqfs, whose sums faiss rounds. With devices, faiss is refused for product "
            "quantizers, because it adds up their distances differently."
        ),
    ] = "auto"
    coarse_quantization: Annotated[
        CoarseQuantizationName,
        Setting(
            help="What finds the lists of a batch's queries. 'auto': a GPU if it was faster than the host; the "
            "host proves the GPU's results. 'host': only the host. 'device': the first device as far as it "
            "can, also the stand-in. Answers are the same."
        ),
    ] = "auto"
    precision: Annotated[
        PrecisionName,
        Setting(
            help="What searches scan. 'codes': the codes of hybridindex compress, a few bits per dimension; then "
            "they compare the best candidates by their rows. 'rows': all rows of the probed lists. 'auto': as "
            "the plan; without devices or a plan, codes if the index has them and they pay. Devices hold the "
            "same."
        ),
    ] = "auto"
    candidates: Annotated[
        int | None,
        Setting(
            help="Rows that a search by codes compares exactly, at least k; default: as measured when the "
            "index was compressed, for the recall loss allowed then. Does not apply to searches by rows."
        ),
    ] = None
    rows: Annotated[
        RowsName,
        Setting(
            help="Where rows are. 'resident': in memory, as far as they fit, read before the router is ready. "
            "'mapped': on disk, for an index whose rows do not fit in memory. Searches then scan codes, which "
            "are locked in memory, and read only the rows of their candidates; rows are never scanned."
        ),
    ] = "resident"
    cache_fraction: Annotated[
        float,
        Setting(
            help="Fraction of each arena for lists that sessions used and no session holds any more. They give way to "
            "whatever a plan or a session needs. 0: none are kept."
        ),
    ] = 0.5
    health: HealthPolicy = field(default_factory=HealthPolicy)
    shrink_arenas: Annotated[
        bool,
        Setting(
            help="Whether a device gets memory back when a plan needs less. False: none is freed before the end, "
            "for a GPU on which vLLM may start meanwhile: vLLM aborts if a neighbour frees memory."
        ),
    ] = True
    pin_host_lists: Annotated[
        int | None,
        Setting(
            help="Most bytes of page-locked host memory, for the hottest lists that the plan leaves on the host: "
            "sessions copy them at the bus's full speed. The host still scans the mapped file. Default: on a "
            "GPU an eighth of the available memory, on the stand-in none. 0: none.",
            is_bytes=True,
        ),
    ] = None
    warm_bytes: Annotated[
        int | None,
        Setting(
            help="Most bytes of lists that are read into memory before the router is ready, the plan's hottest "
            "first; default: half of the available memory. 0: none, and first searches read from disk.",
            is_bytes=True,
        ),
    ] = None
    scrub_bytes_per_s: Annotated[
        int,
        Setting(
            help="Bytes of lists per second that are compared with their digests while they serve, to detect "
            "damage of disk or memory: searches of a damaged list then fail. 0: no check.",
            is_bytes=True,
        ),
    ] = 64 << 20
    wait_for_lists: Annotated[
        bool,
        Setting(
            help="Whether a session's search waits for lists that are being copied if that is faster, judged by "
            "earlier scans and copies (TeleRAG, Appendix B, case 2)."
        ),
    ] = True

    def __post_init__(self) -> None:
        devices, health = cast("Any", self.devices), cast("Any", self.health)
        if (
            isinstance(devices, str)
            or not isinstance(devices, Sequence)
            or not all(isinstance(d, str) for d in devices)
        ):
            raise InvalidInputError(f"devices is {devices!r}; expected a list of names such as ['cuda:0'] or ['cpu']")
        _set(self, "devices", tuple(devices))
        _set(self, "device_budget_bytes", self._budgets())
        if self.lookahead_bytes is not None:
            _set(self, "lookahead_bytes", check_bytes("lookahead_bytes", self.lookahead_bytes))
        if self.window_ms is not None:
            _set(self, "window_ms", check_milliseconds("window_ms", self.window_ms))
        _set(self, "lookahead_queue_bytes", check_bytes("lookahead_queue_bytes", self.lookahead_queue_bytes))
        if self.max_batch is not None:
            _set(self, "max_batch", check_count("max_batch", self.max_batch, MAX_BATCH_QUERIES))
        if self.threads is not None:
            _set(self, "threads", check_count("threads", self.threads, 4096))
        check_one_of("host_scanner", self.host_scanner, ("auto", "native", "faiss"))
        check_one_of("coarse_quantization", self.coarse_quantization, ("auto", "host", "device"))
        check_one_of("precision", self.precision, ("auto", "codes", "rows"))
        if self.candidates is not None:
            _set(self, "candidates", check_count("candidates", self.candidates, MAX_CANDIDATES))
        if self.precision == "codes" and self.host_scanner == "faiss":
            raise InvalidInputError(
                "precision is 'codes' with host_scanner 'faiss', which scans rows; give host_scanner 'auto' or "
                "'native', or precision 'auto' or 'rows'"
            )
        check_one_of("rows", self.rows, ("resident", "mapped"))
        if self.rows == "mapped":
            for name in ("precision", "host_scanner"):
                if (value := getattr(self, name)) in ("rows", "faiss"):
                    raise InvalidInputError(
                        f"rows is 'mapped' with {name} {value!r}, which scans rows; give {name} 'auto', or rows "
                        "'resident'"
                    )
            if self.warm_bytes:
                raise InvalidInputError(
                    f"warm_bytes is {self.warm_bytes} with rows 'mapped', which reads no rows ahead; give no "
                    "warm_bytes, or rows 'resident'"
                )
        if not (_finite(self.cache_fraction) and 0 <= self.cache_fraction <= 1):
            raise InvalidInputError(f"cache_fraction is {self.cache_fraction!r}; expected a number from 0 to 1")
        if not isinstance(health, HealthPolicy):
            raise InvalidInputError(f"health is {health!r}; expected a HealthPolicy")
        if self.pin_host_lists is not None:
            _set(self, "pin_host_lists", check_bytes("pin_host_lists", self.pin_host_lists))
        if self.warm_bytes is not None:
            _set(self, "warm_bytes", check_bytes("warm_bytes", self.warm_bytes))
        _set(self, "scrub_bytes_per_s", check_bytes("scrub_bytes_per_s", self.scrub_bytes_per_s))
        _check_flag(self, "early_dispatch", "shrink_arenas", "wait_for_lists")

    def _budgets(self) -> int | tuple[int, ...] | None:
        given: Any = self.device_budget_bytes
        if given is None:
            return None
        if isinstance(given, str | Integral) or not hasattr(given, "__len__"):
            return check_bytes("device_budget_bytes", given)
        budgets = tuple(check_bytes("device_budget_bytes", nbytes) for nbytes in given)
        if len(budgets) != len(self.devices):
            raise InvalidInputError(
                f"device_budget_bytes has {len(budgets)} entries for {len(self.devices)} devices; expected one for "
                "all, or one each"
            )
        return budgets

    @property
    def pins_lists(self) -> bool:
        """Whether lists may lie in page-locked host memory."""
        if self.pin_host_lists is None:
            return any(name != "cpu" for name in self.devices)
        return self.pin_host_lists > 0

    def updated(self, changes: RouterSettings) -> RouterConfig:
        """A copy in which ``changes`` replace what was said before; ``health=None``: as before."""
        given: dict[str, Any] = {name: value for name, value in changes.items() if (name, value) != ("health", None)}
        return replace(self, **given)


class RouterOptions(TypedDict, total=False):
    """The fields of :class:`RouterConfig` as keyword arguments, without ``devices``."""

    device_budget_bytes: int | Sequence[int] | None
    lookahead_bytes: int | None
    window_ms: float | None
    lookahead_queue_bytes: int
    max_batch: int | None
    threads: int | None
    early_dispatch: bool
    host_scanner: HostScannerName
    coarse_quantization: CoarseQuantizationName
    precision: PrecisionName
    candidates: int | None
    rows: RowsName
    cache_fraction: float
    shrink_arenas: bool
    health: HealthPolicy | None
    pin_host_lists: int | None
    warm_bytes: int | None
    scrub_bytes_per_s: int
    wait_for_lists: bool


class RouterSettings(RouterOptions, total=False):
    """The fields of :class:`RouterConfig` as keyword arguments."""

    devices: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchParams:
    """How one call searches. What depends on the index, :meth:`check_index` checks.

    Raises:
        InvalidInputError: names the argument, its value and what would be right.
    """

    #: 1..2048.
    k: int = 10
    #: Lists per query; None: the plan's, without a plan the index's.
    nprobe: int | None = None
    #: Time from the call in which the answer should be there. The router lowers nprobe to fit, never below
    #: ``min_nprobe``. None: nprobe is never lowered.
    deadline_ms: float | None = None
    min_nprobe: int = 1
    #: Rows that a search by codes compares exactly, k at least; None: the router's. Of rows: of no effect.
    candidates: int | None = None
    #: (m,) int64: ids that may be answered; None: all. Those that no row has change nothing.
    allow_ids: I64 | None = field(default=None, compare=False)
    #: (m,) int64: ids that may not be.
    deny_ids: I64 | None = field(default=None, compare=False)
    #: A condition on attributes.
    where: str | None = None
    #: Instead of these: what :meth:`hybridindex.router.Router.filter` made of them.
    row_filter: Any = field(default=None, compare=False)
    #: In a cluster, the least fraction of each query's work, 0 < x <= 1, that an answer may rest on where nodes are
    #: away or late. None: all of it, or an error.
    allow_partial: float | None = None

    @property
    def names_rows(self) -> bool:
        """Whether not all rows may be answered."""
        return self.allow_ids is not None or self.deny_ids is not None or self.where is not None

    def __post_init__(self) -> None:
        k, nprobe, least = self.k, self.nprobe, self.min_nprobe
        plain = type(k) is type(least) is int and (nprobe is None or type(nprobe) is int)
        # The way of nearly all searches: each makes one of these, so that functions would cost.
        if not (plain and 0 < k <= MAX_K):
            _set(self, "k", check_count("k", k, MAX_K))
            if nprobe is not None:
                _set(self, "nprobe", _check_integer("nprobe", nprobe))
            _set(self, "min_nprobe", _check_integer("min_nprobe", least))
        if self.deadline_ms is not None:
            _set(self, "deadline_ms", check_milliseconds("deadline_ms", self.deadline_ms))
        if self.candidates is not None:
            _set(self, "candidates", check_count("candidates", self.candidates, MAX_CANDIDATES))
        if self.allow_ids is not None:
            _set(self, "allow_ids", check_ids("allow_ids", self.allow_ids))
        if self.deny_ids is not None:
            _set(self, "deny_ids", check_ids("deny_ids", self.deny_ids))
        if self.allow_partial is not None:
            _set(self, "allow_partial", check_number("allow_partial", self.allow_partial, 1))
        if self.row_filter is not None and self.names_rows:
            raise InvalidInputError("row_filter is given with allow_ids, deny_ids or where; expected it alone")

    def check_index(self, nlist: int) -> None:
        """Raises InvalidInputError: ``nprobe`` or ``min_nprobe`` is not in 1..nlist."""
        if not 0 < self.min_nprobe <= nlist:
            check_count("min_nprobe", self.min_nprobe, nlist)
        if self.nprobe is not None and not 0 < self.nprobe <= nlist:
            check_count("nprobe", self.nprobe, nlist)


def check_ids(name: str, value: Any) -> I64:
    """A copy, contiguous.

    Raises:
        InvalidInputError: it is not one-dimensional, holds no integers, or one that no id can be.
    """
    if np.ma.isMaskedArray(value):
        raise InvalidInputError(f"{name} is masked; expected the ids alone, as {name}.compressed() gives them")
    try:
        ids = np.asarray(list(value) if isinstance(value, Set) else value)
    except ValueError as error:
        raise InvalidInputError(f"{name} is not a list of integers: {error}") from None
    if ids.shape == (0,):
        return np.empty(0, dtype=np.int64)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        what = f"a {type(value).__name__} of dtype {ids.dtype} and shape {ids.shape}"
        raise InvalidInputError(f"{name} is {what}; expected one dimension of integers")
    if ids.max() > _MOST_ID:
        raise InvalidInputError(f"{name} holds {ids.max()}; expected ids of at most {_MOST_ID}")
    return np.array(ids, dtype=np.int64, order="C")


#: For values that were checked and made plain, in ``__post_init__``.
_set = object.__setattr__


def _check_flag(config: object, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(config, name), bool):
            raise InvalidInputError(f"{name} is {getattr(config, name)!r}; expected True or False")
