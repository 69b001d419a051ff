"""What templates say of results that takes more than a filter."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.host.router_overhead import within
from benchmarks.rivals.updating import PEERS

__all__ = [
    "ahead",
    "at_cap",
    "bare",
    "capped",
    "floor",
    "not_there",
    "parts_of",
    "router_met",
    "shares_of_targets",
    "where",
]

#: The largest values of fast scans' dials in results that do not say them.
_FORMER_NPROBE, _FORMER_FACTOR, _FORMER_RABITQ_FACTOR = 768, 16, 32
_OURS = "hybridindex "


def where(environment: Mapping[str, Any]) -> str:
    """Date, CPU, kernels where they are known, and version."""
    kernels = environment.get("kernels")
    cpu = environment["cpu"] + (f" ({kernels})" if kernels else "")
    return f"{environment['date']}, {cpu}, version {environment['versions']['hybridindex']}"


def floor(quartiles: Sequence[float]) -> float:
    """How far the quartiles of a side over itself lie from 1; ``quartiles``: the median and both."""
    return max(abs(quartile - 1) for quartile in quartiles[1:])


def bare(name: str) -> str:
    """The system without "hybridindex"."""
    return name.removeprefix(_OURS)


def ahead(at_recall: Mapping[str, Any], batch: str, level: str) -> dict[str, Any]:
    """Our fastest side and the fastest of the others, queries a second at a recall."""
    rates = {name: by[level] for name, by in at_recall[batch].items() if by[level] is not None}
    ours = max((name for name in rates if name.startswith(_OURS)), key=rates.__getitem__)
    other = max((name for name in rates if not name.startswith(_OURS)), key=rates.__getitem__)
    return {
        "ours": ours,
        "other": other,
        "ours_qps": rates[ours],
        "other_qps": rates[other],
        "ratio": rates[ours] / rates[other],
    }


def _most(data: Mapping[str, Any], name: str) -> dict[str, int]:
    if "most" in data:
        return dict(data["most"][name])
    factor = _FORMER_RABITQ_FACTOR if "RaBitQ" in name else _FORMER_FACTOR
    return {"nprobe": _FORMER_NPROBE, "k_factor": factor, "refine": _FORMER_FACTOR}


def _has_candidates(name: str) -> bool:
    """Whether it is a fast scan whose candidates are compared exactly."""
    return "fs," in name or name.startswith("LanceDB")


def at_cap(data: Mapping[str, Any], cell: Mapping[str, Any], name: str) -> list[str]:
    """Dials of a fast scan that stand at the largest value that was tried, short of all lists."""
    if not _has_candidates(name) or name not in cell["sides"]:
        return []
    setting = {dial: int(value) for dial, value in re.findall(r"(\w+)=(\d+)", cell["sides"][name]["setting"])}
    most = _most(data, name)
    return [
        dial for dial, value in setting.items() if value >= most[dial] and (dial != "nprobe" or value < data["nlist"])
    ]


def capped(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Fast scans whose best setting is at a cap, and those that did not reach a recall.

    One row for a data set, a recall and a system.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for data in found["datasets"]:
        for cell in data["cells"]:
            told = [(name, " and ".join(at_cap(data, cell, name))) for name in cell["sides"]]
            told += [
                (name, f"recall not reached: {best:.3f} at most")
                for name, best in cell["not_reached"].items()
                if _has_candidates(name)
            ]
            for name, what in told:
                if what:
                    key = (data["dataset"], cell["recall"], name, what)
                    rows.setdefault(key, {"data": key[0], "recall": key[1], "name": name, "what": what, "cells": []})
                    rows[key]["cells"].append(f"{cell['batch']}, {cell['threads']}")
    return list(rows.values())


def parts_of(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each data set of the comparison at equal recall has, and where it was measured."""
    rows = []
    for data in found["datasets"]:
        names = {name for cell in data["cells"] for part in ("sides", "not_reached") for name in cell[part]}
        bits = sorted({int(match[1]) for name in names if (match := re.match(rf"{_OURS}(\d+) bit,", name))})
        threads = sorted({cell["threads"] for cell in data["cells"]})
        rows.append(
            {
                "data": data["dataset"],
                "shape": f"{data['count']:,} \N{MULTIPLICATION SIGN} {data['dim']}, {data['nlist']:,}",
                "bits": ", ".join(map(str, bits)),
                "threads": ", ".join(map(str, threads)),
                "where": where(data.get("environment", found["environment"])),
                "absent": ", ".join(data["not_measured"]) or "none",
            }
        )
    return rows


def not_there(part: Mapping[str, Any]) -> dict[str, str]:
    """Durable systems without a row of added batches, and why.

    Those that a result does not mention were not asked for.
    """
    names = [peer.name for peer in PEERS if peer.is_rival and peer.name not in part["batches"]["rows"]]
    return {name: part["absent"].get(name, "not asked for") for name in names}


def shares_of_targets(rows: Iterable[Mapping[str, Any]]) -> list[float]:
    """What part of its target each row reaches."""
    return [row["ratio"] / row["target"] for row in rows]


def router_met(row: Mapping[str, Any]) -> bool | None:
    """Of the router with the same scanner, whatever the result says."""
    extra_s = row["same_scanner_us"] * 1e-6
    # Its time over the bare scan's; both are in the result.
    share = row["same_scanner_percent"] / 100
    return within(row["batch"], extra_s, extra_s / share if share else 1.0)
