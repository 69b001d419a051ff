"""What templates say of results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.texts import say
from benchmarks.texts.render import RESULTS, passages


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def changed(folder: Path, name: str, change: Any) -> Path:
    """The committed results, one of them changed."""
    shutil.copytree(RESULTS, folder, dirs_exist_ok=True)
    file = folder / f"{name}.json"
    found = json.loads(file.read_text())
    change(found)
    file.write_text(json.dumps(found))
    return folder


def test_a_floor_counts_what_lies_below_one():
    assert say.floor([1.0, 0.5, 1.1]) == pytest.approx(0.5)
    assert say.floor([0.8, 0.9, 1.3]) == pytest.approx(0.3)


def test_a_noisy_row_is_seen_in_the_passage_of_product_quantizers(tmp_path):
    def quieter_above(found):
        for row in found["rows"]:
            row["noise"] = [1.0, 0.99, 1.01]
        found["rows"][0]["noise"] = [0.9, 0.23, 1.0]

    said = passages("performance.md", changed(tmp_path, "pq", quieter_above))["pq"]
    assert "77 % in the worst; in 1 of 64 rows" in said
    assert " (77) |" in said


def test_a_row_of_filters_has_its_own_floor(tmp_path):
    def noisy(found):
        found["rows"][0]["floor"] = 0.87

    said = passages("filters.md", changed(tmp_path, "filters", noisy))["filters"]
    assert said.count("(floor 87 %") == 1


def test_both_sets_of_queries_are_in_the_table_of_the_scan():
    rows = result("host_scan")["rows"]
    said = passages("performance.md")["against_faiss"]
    for kind in ("low", "high", "log"):
        assert said.count(f" | {kind} | ") == sum(row["queries"] == kind for row in rows) > 0
    slower = sum(row["ratio"] < 1 for row in rows)
    assert f"slower than faiss in {slower} of {len(rows)} rows" in said


def test_the_fastest_other_side_is_found_whoever_it_is():
    rates = {"1": {"hybridindex a": {"0.9": 3.0}, "hybridindex b": {"0.9": 2.0}, "x": {"0.9": 4.0}, "y": {"0.9": None}}}
    assert say.ahead(rates, "1", "0.9") == {
        "ours": "hybridindex a",
        "other": "x",
        "ours_qps": 3.0,
        "other_qps": 4.0,
        "ratio": 0.75,
    }


def test_the_readme_names_the_fastest_other_side(tmp_path):
    def faster(found):
        found["at_recall"]["64"]["usearch HNSW"]["0.95"] = 99_000.0

    said = passages("README.md", changed(tmp_path, "recall_qps", faster))["numbers"]
    assert "usearch HNSW, 99,000" in said
    assert "without a router" in said


@pytest.mark.parametrize(
    ("batch", "same_us", "same_percent", "met"),
    [
        (1, 140.0, 85.0, True),
        (1, 188.0, 48.0, False),
        (4, 9e9, 9e9, None),
        (16, 363.0, 26.8, False),
        (64, -1.0, -0.1, True),
    ],
)
def test_the_router_is_judged_with_the_same_scanner(batch, same_us, same_percent, met):
    row = {
        "batch": batch,
        "met": not met,
        "extra_us": 0.0,
        "same_scanner_us": same_us,
        "same_scanner_percent": same_percent,
    }
    assert say.router_met(row) is met


def two_cells(**more: Any) -> dict[str, Any]:
    def cell(threads: int) -> dict[str, Any]:
        sides = {
            "faiss IVF,PQ8x4fs,RFlat": {"setting": "nprobe=100 k_factor=16"},
            "faiss IVF,RaBitQ1fs,RFlat": {"setting": "nprobe=768 k_factor=16"},
            "hybridindex 2 bit, flat": {"setting": "nprobe=768 candidates=16"},
        }
        return {
            "recall": 0.9,
            "batch": 1,
            "threads": threads,
            "sides": sides,
            "not_reached": {"LanceDB IVF,PQ8x4": 0.8},
        }

    data = {"dataset": "d", "nlist": 1000, "count": 5_000, "dim": 8, "not_measured": {"x": "absent"}, **more}
    environment = {"date": "2026-01-01", "cpu": "A", "versions": {"hybridindex": "1.0"}}
    return {"environment": environment, "datasets": [{**data, "cells": [cell(1), cell(2)]}]}


def test_fast_scans_at_their_largest_dials_are_named():
    assert [(row["name"], row["what"], row["cells"]) for row in say.capped(two_cells())] == [
        ("faiss IVF,PQ8x4fs,RFlat", "k_factor", ["1, 1", "1, 2"]),
        ("faiss IVF,RaBitQ1fs,RFlat", "nprobe", ["1, 1", "1, 2"]),
        ("LanceDB IVF,PQ8x4", "recall not reached: 0.800 at most", ["1, 1", "1, 2"]),
    ]
    # All lists are no cap, and a result that says its dials is believed.
    assert [row["name"] for row in say.capped(two_cells(nlist=768))][1:] == ["LanceDB IVF,PQ8x4"]
    larger = {"nprobe": 3072, "k_factor": 64}
    most = dict.fromkeys(two_cells()["datasets"][0]["cells"][0]["sides"], larger)
    assert [row["name"] for row in say.capped(two_cells(most=most))] == ["LanceDB IVF,PQ8x4"]


def test_the_parts_of_a_result_say_where_they_were_measured():
    other = {"date": "2026-02-02", "cpu": "B", "kernels": "avx512", "versions": {"hybridindex": "2.0"}}
    (here,), (there,) = say.parts_of(two_cells()), say.parts_of(two_cells(environment=other))
    assert (here["bits"], here["threads"], here["absent"]) == ("2", "1, 2", "x")
    assert here["where"] == "2026-01-01, A, version 1.0"
    assert there["where"] == "2026-02-02, B (avx512), version 2.0"


def test_systems_that_were_not_asked_for_are_named():
    part = {"batches": {"rows": {"pgvector IVFFlat": {}}}, "absent": {"Chroma HNSW": "no chromadb"}}
    found = say.not_there(part)
    assert found["Chroma HNSW"] == "no chromadb"
    assert found["faiss IVF,Flat"] == "not asked for"
    assert "pgvector IVFFlat" not in found
    assert "faiss IVF,Flat (not asked for)" in passages("updates.md")["updates"]


def test_every_line_of_the_numbers_says_when_and_where():
    lines = [line for line in passages("numbers.md")["table"].splitlines() if line.startswith("| ")]
    assert len({line.count(" | ") for line in lines}) <= 2
    for line in lines[2:]:
        assert "2026-" in line.split(" | ")[-1], line
