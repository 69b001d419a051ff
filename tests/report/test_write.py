from __future__ import annotations

import base64
import csv
import dataclasses
import errno
import re
import shutil
import struct
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hybridindex.errors import DiskFullError, MissingDependencyError, ProfileMismatchError
from hybridindex.filesystem import watched_by
from hybridindex.partitioner.plan import Plan, make_plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.report import ReportFiles, write_report
from hybridindex.report.acts import acts_of_demo
from hybridindex.types import Profile
from tests.faults import FaultyDisk, of
from tests.report.conftest import INDEX_INFO, LOAD

VOID = {"meta", "img", "br", "link"}
ALL_NAMES = {
    "slo-bytes",
    "hit-rate",
    "access",
    "load",
    "latency-fit",
    "latency-check",
    "recall",
    "transfers",
}


class Reader(HTMLParser):
    """Checks nesting; collects tags, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    assert reader.open == []
    return reader


def png_size(data: bytes) -> tuple[int, int]:
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_full_report_has_every_picture_and_table(full_report: ReportFiles, full_plan: Plan) -> None:
    reader = read(full_report.html)
    assert {png.stem for png in full_report.pngs} == ALL_NAMES
    assert sum(tag == "img" for tag, _ in reader.tags) == len(ALL_NAMES)
    assert sum(tag == "details" for tag, _ in reader.tags) == 1
    assert "Not measured." not in reader.text
    for line in full_plan.explain().splitlines():
        assert line in reader.text
    for wanted in (
        "Key numbers",
        "Coverage by bytes",
        "OMP_WAIT_POLICY",
        "Load average",
        "hybrid",
        "Predicted latency",
    ):
        assert wanted in reader.text


def test_pictures_are_sharp_at_800_pixels_and_the_same_as_in_the_page(full_report: ReportFiles) -> None:
    embedded = [
        base64.b64decode((attrs["src"] or "").removeprefix("data:image/png;base64,"))
        for tag, attrs in read(full_report.html).tags
        if tag == "img"
    ]
    for png in full_report.pngs:
        data = png.read_bytes()
        width, height = png_size(data)
        assert width == 1600
        assert 600 <= height <= 1400
        assert 10_000 < len(data) < 600_000
        assert data in embedded


def test_page_needs_nothing_outside_itself(full_report: ReportFiles) -> None:
    page = full_report.html.read_text(encoding="utf-8")
    stripped = re.sub(r"base64,[A-Za-z0-9+/=]+", "", page)
    assert "http:" not in stripped
    assert "https:" not in stripped
    assert "file:" not in stripped
    assert "url(" not in stripped
    assert "@import" not in stripped
    assert str(full_report.html.parent) not in stripped
    assert str(Path.home()) not in stripped
    for tag, attrs in read(full_report.html).tags:
        assert tag not in {"script", "link", "iframe", "object", "embed", "base"}
        assert (attrs.get("href") or "data:").startswith("data:")
        assert (attrs.get("src") or "data:").startswith("data:")


def test_stand_in_device_is_said_before_anything_else(full_report: ReportFiles) -> None:
    text = read(full_report.html).text
    assert text.index("Stand-in device.") < text.index("Key numbers")
    assert "say nothing about a GPU" in text


def test_hostile_text_stays_text(tmp_path: Path, bare_profile: Profile, bare_plan: Plan) -> None:
    bad = '<script>alert("x")</script>&amp;$\\frac{1}{0}$ 漢'
    profile = dataclasses.replace(
        bare_profile,
        hardware=dataclasses.replace(bare_profile.hardware, cpu_model=bad, devices=(bad,)),
        notes={bad: bad, "nested": {bad: bad}},
    )
    files = write_report(
        tmp_path,
        index_info={**INDEX_INFO, "name": bad, "codec": bad},
        profile=profile,
        plan=bare_plan,
        load=[{**LOAD[0], "policy": bad}, {**LOAD[0], "policy": "_hidden"}],
        notes=[bad],
        devices=[bad],
    )
    reader = read(files.html)
    assert all(tag != "script" for tag, _ in reader.tags)
    assert reader.text.count(bad) >= 6


def test_sections_without_data_say_so(bare_report: ReportFiles) -> None:
    reader = read(bare_report.html)
    assert {png.stem for png in bare_report.pngs} == ALL_NAMES - {"load", "recall", "transfers"}
    assert reader.text.count("Not measured.") == 3
    assert "No load test was run" in reader.text
    assert "no device was timed" in reader.text


def test_profile_with_nothing_but_full_scans_and_few_queries(tmp_path: Path, bare_profile: Profile) -> None:
    access = dataclasses.replace(bare_profile.access, held_probes=bare_profile.access.held_probes[:9])
    stages = tuple(s for s in bare_profile.stages if s.stage == "host_scan" and s.coverage == 0)
    profile = dataclasses.replace(bare_profile, access=access, stages=stages)
    plan = make_plan(profile, PlanRequest.resolve(slo_ms=5.0, device_budget_bytes=0))
    files = write_report(tmp_path, index_info=INDEX_INFO, profile=profile, plan=plan)
    assert {png.stem for png in files.pngs} == {"slo-bytes", "access", "latency-fit"}
    assert read(files.html).text.count("Not measured.") == 5


@pytest.mark.parametrize(
    "asked",
    [
        {"slo_ms": 1e-3, "device_budget_bytes": 1 << 20},
        {"slo_ms": 5e3, "device_budget_bytes": 1 << 40, "n_devices": 2},
        {"slo_ms": 0.8, "device_budget_bytes": 12 << 20, "rate_qps": 1e7},
        {"slo_ms": 0.8, "device_budget_bytes": 12 << 20, "coverage": 1.0},
    ],
    ids=["too-fast", "too-slow", "overload", "fixed"],
)
def test_extreme_plans_are_drawn(tmp_path: Path, bare_profile: Profile, asked: dict[str, float]) -> None:
    plan = make_plan(bare_profile, PlanRequest.resolve(**asked))  # type: ignore[arg-type]
    files = write_report(tmp_path, index_info=INDEX_INFO, profile=bare_profile, plan=plan)
    assert plan.verdict.value in read(files.html).text
    assert tmp_path / "slo-bytes.png" in files.pngs


def test_a_plan_without_lists_speaks_of_no_hits(tmp_path: Path, bare_profile: Profile) -> None:
    plan = make_plan(bare_profile, PlanRequest.resolve(slo_ms=50.0, device_budget_bytes=12 << 20))
    assert not plan.resident_lists.size
    text = read(write_report(tmp_path, index_info=INDEX_INFO, profile=bare_profile, plan=plan).html).text
    assert "everything stays on the host" in text
    assert "The plan keeps no list on a device." in text
    for gone in ("Predicted hit rate", "mean hit rate", "slowest query's hit rate", "the plan: 0.0%"):
        assert gone not in text


def test_each_picture_comes_with_its_numbers(full_report: ReportFiles) -> None:
    """Beside the picture, and in the page."""
    page = full_report.html.read_text(encoding="utf-8")
    assert [path.stem for path in full_report.csvs] == [path.stem for path in full_report.pngs]
    for path in full_report.csvs:
        rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
        assert rows[0] == ["panel", "series", "x_axis", "x", "y_axis", "y", "y_to"]
        assert len(rows) > 2, path.name
        assert all(len(row) == 7 and float(row[5]) < 1e18 for row in rows[1:]), path.name
        (link,) = re.findall(rf'download="{path.name}" href="data:text/csv;base64,([^"]+)"', page)
        assert base64.b64decode(link) == path.read_bytes()


def test_numbers_name_their_series(full_report: ReportFiles) -> None:
    for path in full_report.csvs:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
        assert not [row["series"] for row in rows if row["series"].isdecimal()], path.name


def test_numbers_of_a_load_are_by_policy_and_rate(full_report: ReportFiles) -> None:
    (path,) = [path for path in full_report.csvs if path.stem == "load"]
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    found = {(row["series"], row["x"]): float(row["y"]) for row in rows}
    assert len(found) == len(rows), "a point twice"
    expected = {
        (f"{row['policy']} {name}", f"{row['rate']:g}"): row[f"{name}_ms"]
        for row in LOAD
        for name in ("p50", "p95", "p99")
    }
    assert found == expected | {(row["policy"], f"{row['rate']:g}"): row["attainment"] for row in LOAD}


def test_dark_pages_have_dark_pictures(full_report: ReportFiles) -> None:
    page = full_report.html.read_text(encoding="utf-8")
    style = page[page.index("<style>") : page.index("</style>")]
    dark = style[style.index("prefers-color-scheme: dark") :]
    assert "img { filter: invert" in dark
    # Every colour is a variable, or would stay as it is in the dark.
    rules = style.partition("body {")[2]
    assert not re.findall(r"#[0-9a-fA-F]{3,6}\b", rules)


def test_second_report_replaces_the_first_and_drops_its_stale_pictures(
    tmp_path: Path, full_report: ReportFiles, bare_profile: Profile, bare_plan: Plan
) -> None:
    shutil.copytree(full_report.html.parent, tmp_path, dirs_exist_ok=True)
    mine = tmp_path / "mine.png"
    mine.write_bytes(b"not ours")
    files = write_report(tmp_path, index_info=INDEX_INFO, profile=bare_profile, plan=bare_plan)
    assert {p.name for p in tmp_path.iterdir()} == {
        "report.html",
        "mine.png",
        *(p.name for p in (*files.pngs, *files.csvs)),
    }


def test_pictures_of_earlier_acts_go_too(tmp_path: Path, bare_profile: Profile, bare_plan: Plan) -> None:
    same: dict[str, Any] = {
        "hit_rates": (0.1, 0.2), "queries": 9, "plans": 2, "lookaheads": 0, "differences": 0, "recall": 0.9,
        "brute_queries": 3, "answers": [1, 2], "changed_s": [0.1],
    }  # fmt: skip
    projection: dict[str, Any] = {
        "hardware": "h100", "llm": "m", "index_bytes": 1, "slo_ms": 9.0, "attainment": {"host": [0.5]},
        "rates": [1.0], "refused": {}, "device_bytes": {"host": 0}, "assumptions": [],
    }  # fmt: skip
    load = [{"policy": "host", "rate": 1.0, "attainment": 0.5, "device_bytes": 0}]
    for found, acts_pictures in ((projection, {"projection"}), (None, {"attainment"})):
        acts = acts_of_demo(bare_plan, same, None, found, load, "a device")
        files = write_report(tmp_path, index_info=INDEX_INFO, profile=bare_profile, plan=bare_plan, acts=acts)
        assert acts_pictures | {"same-answers"} <= {path.stem for path in files.pngs}
        assert {path.stem for path in tmp_path.glob("*.png")} == {path.stem for path in files.pngs}
    left = write_report(tmp_path, index_info=INDEX_INFO, profile=bare_profile, plan=bare_plan)
    expected = {"report.html", *(path.name for path in (*left.pngs, *left.csvs))}
    assert {path.name for path in tmp_path.iterdir()} == expected


def test_failed_write_keeps_the_old_report_whole(
    tmp_path: Path,
    bare_report: ReportFiles,
    bare_profile: Profile,
    bare_plan: Plan,
) -> None:
    shutil.copytree(bare_report.html.parent, tmp_path, dirs_exist_ok=True)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    disk = FaultyDisk(counts=of("sync"), allowed=0, number=errno.ENOSPC)
    with watched_by(disk), pytest.raises(DiskFullError, match=f"{tmp_path} cannot be written .*No space.*make room"):
        write_report(tmp_path, index_info=INDEX_INFO, profile=bare_profile, plan=bare_plan, title="new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert bare_report.html.name in before


def test_plan_of_another_index_is_refused(tmp_path: Path, bare_profile: Profile, bare_plan: Plan) -> None:
    other = dataclasses.replace(bare_profile, index_fingerprint="other")
    with pytest.raises(ProfileMismatchError, match="index fingerprint is 'index-1', the profile's 'other'"):
        write_report(tmp_path / "out", index_info=INDEX_INFO, profile=other, plan=bare_plan)
    assert not (tmp_path / "out").exists()


def test_missing_matplotlib_names_the_extra(
    tmp_path: Path, bare_profile: Profile, bare_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match="pip install 'matplotlib"):
        write_report(tmp_path, index_info=INDEX_INFO, profile=bare_profile, plan=bare_plan)
    assert list(tmp_path.iterdir()) == []
