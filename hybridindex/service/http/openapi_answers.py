"""Answers of the OpenAPI document: closed schemas, so that a test can check every answer against them.

Schemas of dataclasses are derived from their fields. A refresher's status and updates are only known to be objects.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from hybridindex.answer_codec import ANSWER_TYPE
from hybridindex.index.rabitq.spec import SUPPORTED_BITS
from hybridindex.partitioner.tradeoff import TradeoffPoint
from hybridindex.router.batch.stats import RouterStats
from hybridindex.router.devices.usage import ArenaUse
from hybridindex.router.session import SessionStats
from hybridindex.service.observe.series import Sample
from hybridindex.service.status import LIMITS, Check
from hybridindex.store.records import PlanSummary, ProfileSummary

Schema = dict[str, Any]

_INTEGER: Schema = {"type": "integer"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
_TEXT: Schema = {"type": "string"}
_YES: Schema = {"type": "boolean"}
_ANY_OBJECT: Schema = {"type": "object"}


def closed(properties: dict[str, Schema], optional: tuple[str, ...] = ()) -> Schema:
    """An object with these keys and no others."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def answer(schema: Schema, description: str, example: Any = None) -> Schema:
    """A response of one JSON document."""
    media = {"schema": schema} if example is None else {"schema": schema, "example": example}
    return {"description": description, "content": {"application/json": media}}


def _nullable(schema: Schema) -> Schema:
    return {"oneOf": [schema, {"type": "null"}]}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _described(kind: Any) -> Schema:
    """The schema of what :func:`hybridindex.service.describe.describe` makes of a value of type ``kind``."""
    if get_origin(kind) is Mapping:
        return {"type": "object", "additionalProperties": _described(get_args(kind)[1])}
    if get_origin(kind) in (Union, types.UnionType):
        (only,) = [part for part in get_args(kind) if part is not type(None)]
        return _nullable(_described(only))
    known = {bool: _YES, int: _INTEGER, str: _TEXT, float: {"type": ["number", "null"]}}
    if kind in known:
        return known[kind]
    hints = get_type_hints(kind)
    return closed({f.name: _described(hints[f.name]) for f in fields(kind) if not f.name.startswith("_")})


def _plan_summary() -> Schema:
    counts = ("device_bytes", "page_bytes", "n_resident", "n_resident_rows", "n_devices", "batch")
    numbers = ("slo_ms", "coverage", "coverage_bytes")
    maybe = ("predicted_latency_ms", "rate_qps", "max_sustainable_qps", "nearest_slo_ms", "predicted_row_faults")
    return closed(
        {
            "verdict": {"enum": ["feasible", "infeasible"]},
            "reason": _TEXT,
            **dict.fromkeys(counts, _COUNT),
            **dict.fromkeys(numbers, _NUMBER),
            "bytes_by_precision": closed({"codes": _COUNT, "rows": _COUNT}, optional=("codes",)),
            **dict.fromkeys(("predicted_hit_rate", "predicted_row_hit_rate"), _SHARE),
            **dict.fromkeys(maybe, _nullable(_NUMBER)),
            "row_cache_bytes": _nullable(_COUNT),
            "hit_rate_model": _TEXT,
            "host_model": _TEXT,
            "precision": {"enum": ["rows", "codes"]},
            "bits": {"enum": [None, *SUPPORTED_BITS]},
        }
    )


SEARCHED: Schema = {
    "description": "Neighbours, best first. An empty place has id -1 and a null distance.",
    "content": {
        "application/json": {
            "schema": closed(
                {
                    "ids": _array(_array({"type": "integer", "minimum": -1})),
                    "distances": _array(_array(_nullable(_NUMBER))),
                    "nprobe_used": _array(_COUNT),
                    "hit_rate": _array(_SHARE),
                    "coverage": _array(_SHARE),
                },
                optional=("coverage",),
            ),
            "example": {"ids": [[17, 4]], "distances": [[0.11, 0.36]], "nprobe_used": [64], "hit_rate": [0.83]},
        },
        ANSWER_TYPE: {"schema": {"type": "string", "format": "binary"}},
    },
}
SESSION_OPENED = answer(
    closed({"session": {"type": "string", "pattern": "^[A-Za-z0-9_-]{32}$"}, "ttl_s": {**_NUMBER, "minimum": 0}}),
    "It ends when it was not used for ttl_s",
)
SESSION_STATS = answer(_described(SessionStats), "What lookahead did for this session")
STARTED = answer(
    closed({"started": {"const": True}, "dropped": _COUNT}),
    "Lists move when their turn comes; dropped: older lookaheads of this key that made way in the queue",
    {"started": True, "dropped": 0},
)
DRAINING = answer(closed({"draining": {"const": True}}), "The daemon finishes and stops")
HEALTH = answer(closed({"ok": _YES, "checks": _array(_described(Check))}), "Everything that was looked at")
PLAN = answer(
    closed({"plan_id": _nullable(_INTEGER), "plan": _nullable(_plan_summary()), "explanation": _TEXT}),
    "The plan in force; null when the host scans everything",
)
STORED_PLAN = answer(
    closed({"plan_id": _INTEGER, "plan": _plan_summary(), "explanation": _TEXT}), "A plan and its explanation"
)
RECENT = answer(
    closed({"offered": _COUNT, "kept": _COUNT}),
    "How many queries were given, and how many recent queries are kept now",
    {"offered": 1, "kept": 1},
)
PLANS = answer(
    closed(
        {
            "current": _nullable(_INTEGER),
            "plans": _array(_described(PlanSummary)),
            "profiles": _array(_described(ProfileSummary)),
            "applied": _array(closed({"at": _TEXT, "plan_id": _INTEGER})),
            "gone": _array(_TEXT),
        }
    ),
    "Stored plans in the order of saving, and when each was applied",
)
_HELD: dict[str, Schema] = {"lists": _COUNT, "rows": _COUNT, "bytes": _COUNT}
_SHORT: dict[str, Schema] = {
    **_HELD,
    "verdict": {"enum": ["feasible", "infeasible"]},
    "hit_rate": _SHARE,
    "latency_ms": _nullable(_NUMBER),
}
#: Of one budget that several indexes share; bytes of each device.
SHARE = closed(
    {
        "share_bytes": _array(_COUNT),
        "needs_bytes": _nullable(_COUNT),
        "verdict": {"enum": ["feasible", "infeasible"]},
    }
)
REPARTITIONED = answer(
    closed(
        {
            "applied": _YES,
            "plan_id": _nullable(_INTEGER),
            "unplaced_lists": _nullable(_COUNT),
            "update": _nullable(_ANY_OBJECT),
            "shares": {"type": "object", "additionalProperties": SHARE},
            "number": _nullable(_COUNT),
            "reason": _TEXT,
            "created_at": _nullable(_TEXT),
            "n_queries": _nullable(_COUNT),
            "plan": _plan_summary(),
            "current": _nullable(_plan_summary()),
            "resident": closed(_HELD),
            "planned": closed(_SHORT),
            "placed": closed({**_SHORT, "reason": _TEXT}),
            **dict.fromkeys(("hit_rate_before", "hit_rate_after"), _SHARE),
            **dict.fromkeys(("latency_ms_before", "latency_ms_after"), _nullable(_NUMBER)),
            "verdict_before": {"enum": ["feasible", "infeasible"]},
            **dict.fromkeys(("max_qps_before", "max_qps_after"), _nullable(_NUMBER)),
            "gain": closed(
                {"latency_ms": _nullable(_NUMBER), "hit_rate": _NUMBER, "device_bytes": _INTEGER, "batch": _COUNT}
            ),
            **dict.fromkeys(("lists_to_move", "bytes_to_move", "lists_to_drop"), _COUNT),
            "move_s": _nullable(_NUMBER),
            "bandwidth_share": _NUMBER,
            "worthwhile": _nullable(_YES),
            "objection": _nullable(_TEXT),
            "stage_seconds": {"type": "object", "additionalProperties": _NUMBER},
        },
        optional=("shares",),
    ),
    "What changes, or would: what devices hold before (resident), what the plan wants there (planned), and what has "
    "room there (placed), of which hit rate, latency and gain are told. Null: unplaced_lists and update of a dry run, "
    "and plan_id unless its plan is stored; update, number, created_at, n_queries, worthwhile and objection where no "
    "refresh plans from recent queries; current without a plan. shares: of one budget, where several "
    "indexes are served",
)
INDEXES = answer(
    closed(
        {
            "device_budget_bytes": _nullable(_array(_COUNT)),
            "indexes": _array(
                closed(
                    {
                        "name": _TEXT,
                        "ready": _YES,
                        "note": _nullable(_TEXT),
                        **dict.fromkeys(("count", "dim", "generation"), _nullable(_COUNT)),
                        **dict.fromkeys(("metric", "codec", "fingerprint"), _nullable(_TEXT)),
                        "slo_ms": _nullable(_NUMBER),
                        "plan_id": _nullable(_INTEGER),
                        "plan": _nullable(_plan_summary()),
                        "share_bytes": _nullable(_array(_COUNT)),
                    }
                )
            ),
        }
    ),
    "All indexes, the first first; all but name, ready and note are null for one that could not be opened. Bytes are "
    "those of each device, null without a share of one budget",
)
ADDED = answer(
    closed(
        {
            "added": _COUNT,
            "replaced": _COUNT,
            "ids": _nullable(_array(_COUNT)),
            "number": _COUNT,
        }
    ),
    "How many rows are new, and how many took the place of others; ids where the index numbered them; number of the "
    "change",
    {"added": 1, "replaced": 0, "ids": None, "number": 12},
)
COMPACTING = answer(closed({"started": {"const": True}}), "The compaction continues; /v1/status says when it is done")
COMPACTED = answer(
    closed(
        {
            "compacted": _YES,
            **dict.fromkeys(("generation", "count", "split", "dissolved"), _COUNT),
            "serves": _YES,
        },
        optional=("count", "split", "dissolved"),
    ),
    "What was made; compacted is false where nothing had changed. serves: whether that generation serves already; the "
    "daemon tries until it does",
)
DELETED = answer(
    closed(dict.fromkeys(("deleted", "deleted_in_all", "number"), _COUNT)),
    "How many ids had rows, and all so far; number of the last change",
)
DOCUMENTS_ADDED = answer(
    closed(
        {
            "sources": closed(dict.fromkeys(("added", "changed", "unchanged"), _COUNT)),
            "chunks": closed(dict.fromkeys(("added", "unchanged", "removed"), _COUNT)),
            "number": _COUNT,
        }
    ),
    "How many documents are new, changed, or as they were; what became of their chunks (unchanged: of documents that "
    "changed); number of the last change",
    {
        "sources": {"added": 1, "changed": 0, "unchanged": 0},
        "chunks": {"added": 3, "unchanged": 0, "removed": 0},
        "number": 12,
    },
)
DOCUMENTS_DELETED = answer(
    closed({"sources": closed({"removed": _COUNT}), "chunks": closed({"removed": _COUNT}), "number": _COUNT}),
    "How many documents were there, and their chunks; number of the last change",
    {"sources": {"removed": 1}, "chunks": {"removed": 3}, "number": 13},
)
RELOADED = answer(
    closed(
        {
            "reloaded": _YES,
            "reason": _TEXT,
            **dict.fromkeys(("generation_before", "generation", "count"), _COUNT),
            "fingerprint": _TEXT,
            "plan_id": _nullable(_INTEGER),
            "plan_origin": {"enum": ["none", "stored", "carried over", "made anew", None]},
            "note": _nullable(_TEXT),
            "removed_generations": _array(_COUNT),
        }
    ),
    "What serves now; reloaded is false, and plan_origin null, where it served already. note says why there is no "
    "plan, or no devices",
)
#: Of the rows.
_CHANGES = closed(
    {
        **dict.fromkeys(("writes", "writer"), _YES),
        **dict.fromkeys(("added", "deleted", "live", "added_bytes", "log_bytes", "number", "compactions"), _COUNT),
        **dict.fromkeys(("split", "dissolved"), _COUNT),
        "changed_share": {**_NUMBER, "minimum": 0},
        "problem": _nullable(_TEXT),
    }
)
#: Of a node of one.
_CLUSTER = _nullable(
    closed(
        {
            **dict.fromkeys(("map_version", "replicas", "held_lists", "held_bytes", "lists_below_replicas"), _COUNT),
            "unreachable_lists": _COUNT,
            "unreachable_share": _SHARE,
            "fan_out": _nullable({**_NUMBER, "minimum": 0}),
            "nodes": _array(
                closed(
                    {
                        **dict.fromkeys(("name", "state"), _TEXT),
                        **dict.fromkeys(("lists", "bytes", "asked", "hedged", "failed"), _COUNT),
                    }
                )
            ),
        }
    )
)
STATUS = answer(
    closed(
        {
            "index": closed(
                {
                    **dict.fromkeys(("fingerprint", "metric", "codec", "host_scanner", "precision"), _TEXT),
                    **dict.fromkeys(("generation", "count", "deleted", "dim", "nlist", "nprobe", "list_bytes"), _COUNT),
                    "attributes": {"type": "object", "additionalProperties": _TEXT},
                    **dict.fromkeys(("bits", "candidates"), _nullable(_COUNT)),
                    "rows": {"enum": ["resident", "mapped"]},
                }
            ),
            "changes": _CHANGES,
            "limits": closed(dict.fromkeys(LIMITS, _COUNT)),
            "ready": _YES,
            "draining": _YES,
            "uptime_s": {**_NUMBER, "minimum": 0},
            "slo_ms": _nullable(_NUMBER),
            "plan_id": _nullable(_INTEGER),
            "expected_hit_rate": _nullable(_SHARE),
            "planned_hit_rate": _nullable(_SHARE),
            "residency": closed({"version": _COUNT, "lists": _COUNT, "rows": _COUNT}),
            "devices": _array(
                closed(
                    {
                        "name": _TEXT,
                        "usable": _YES,
                        "disabled_reason": _nullable(_TEXT),
                        "failed": _YES,
                        **dict.fromkeys(("failures", "resident_bytes", "moved_bytes"), _COUNT),
                    }
                )
            ),
            "router": {
                **(router := _described(RouterStats)),
                "properties": {**router["properties"], "hit_rate": _SHARE, "rerank_hit_rate": _SHARE},
                "required": [*router["required"], "hit_rate", "rerank_hit_rate"],
            },
            "queue": closed(
                {
                    **dict.fromkeys(("waiting", "in_flight", "limit"), _COUNT),
                    "refused": closed(dict.fromkeys(("client", "queue", "draining", "deadline"), _COUNT)),
                }
            ),
            "memory": closed(
                {
                    **dict.fromkeys(("taken_bytes", "limit_bytes"), _COUNT),
                    "refused": closed(dict.fromkeys(("full", "share"), _COUNT)),
                }
            ),
            "sessions": closed(dict.fromkeys(("open", "expired", "displaced"), _COUNT)),
            "refresher": _nullable(_ANY_OBJECT),
            "damage": closed(dict.fromkeys(("passes", "scrubbed_bytes", "found", "quarantined", "mended"), _COUNT)),
            "cluster": _CLUSTER,
            "note": _nullable(_TEXT),
            "reload": closed(
                {
                    "mode": {"enum": ["manual", "auto"]},
                    **dict.fromkeys(("done", "failed"), _COUNT),
                    "under_way": _YES,
                    "last_error": _nullable(_TEXT),
                    "retired": _array(closed({"generation": _COUNT, "sessions": _COUNT})),
                }
            ),
        }
    ),
    "What is served, where lists are, what waits; expected_hit_rate counts the plan's lists that are on devices, "
    "planned_hit_rate all of them; bits and candidates, of a search of 10, are null where rows are scanned; rows "
    "says whether these are kept in memory or on disk; note says why there is no plan, no devices, or which "
    "lists are damaged: searches that probe those in quarantine fail, those that are mended are served from memory; "
    "retired are older generations that sessions still use. changes: rows added and deleted since the lists were "
    "written, rows that searches find, the log, the number of the last change; changed_share: rows added and deleted, "
    "in parts of the lists' own; split, dissolved: lists, by compactions; writes: whether the daemon takes changes, "
    "writer: whether nobody else may write; problem: why the last compaction failed. cluster: of a node of one, else "
    "null; unreachable: on no node that answers; fan_out: scans that others were asked for, per search",
)
SERIES = answer(
    closed(
        {
            "now_s": _NUMBER,
            "clock_s": _NUMBER,
            "samples": closed(
                {f.name: _array(_nullable(_NUMBER)) for f in fields(Sample) if f.name != "devices"},
            ),
            "devices": _array(
                closed(
                    {
                        "name": _TEXT,
                        "disabled_reason": _nullable(_TEXT),
                        "failures": _COUNT,
                        "usable": _array(_YES),
                        **{f.name: _array(_COUNT) for f in fields(ArenaUse) if f.name not in ("name", "usable")},
                        "context_bytes": _array(_nullable(_COUNT)),
                    }
                )
            ),
            "plan_id": _nullable(_INTEGER),
            "planned_hit_rate": _nullable(_SHARE),
            "generation": _COUNT,
            "changes": _CHANGES,
            "precision": _TEXT,
            **dict.fromkeys(("bits", "candidates"), _nullable(_COUNT)),
            "cluster": _CLUSTER,
            "note": _nullable(_TEXT),
            "ready": _YES,
            "draining": _YES,
            "refresher": _nullable(_ANY_OBJECT),
        }
    ),
    "Columns of equal length, oldest first: single seconds for ten minutes, ten in one for the rest of an hour; "
    "clock_s is now on the clock of the refresher's windows; bits and candidates, of a search of 10, are null where "
    "rows are scanned",
)
EVENTS = answer(
    closed({"events": _array(closed({"id": _COUNT, "at": _TEXT, "kind": _TEXT, "payload": _ANY_OBJECT}))}),
    "The newest events, oldest first",
    {"events": [{"id": 3, "at": "2026-01-05T10:00:00+00:00", "kind": "plan_current", "payload": {"plan_id": 2}}]},
)
_POINT = _described(TradeoffPoint)
TRADEOFF = answer(
    _nullable(
        closed(
            {
                "points": _array(_POINT),
                "chosen": _POINT,
                "batch": _COUNT,
                "percentile": _NUMBER,
                **dict.fromkeys(("target_ms", "slo_ms"), _NUMBER),
                "budget_bytes": _COUNT,
                "rate_qps": _nullable(_NUMBER),
            }
        )
    ),
    "The curve that the plan was chosen on; null without a plan",
)
