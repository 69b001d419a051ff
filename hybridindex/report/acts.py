"""What a report of the demo begins with: what is hot, the same answers wherever lists are, and what that buys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridindex.paging import format_bytes
from hybridindex.partitioner.plan import Plan
from hybridindex.report.chart_data import access_shares
from hybridindex.report.fig_profile import draw_access
from hybridindex.report.page import Block, picture_block, table_block, text_block
from hybridindex.report.style import GREY, PALETTE, Picture, canvas, show_percent
from hybridindex.report.tables import Table

__all__ = ["PICTURES_OF_ACTS", "Act", "acts_of_demo", "hot_shares"]

_SAME, _PROJECTED, _MEASURED = "same-answers", "projection", "attainment"
#: Names of pictures that a report without acts has not.
PICTURES_OF_ACTS = (_SAME, _PROJECTED, _MEASURED)

_SHARES = (0.05, 0.1, 0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """A part of the page, and its pictures."""

    blocks: tuple[Block, ...]
    pictures: tuple[Picture, ...]


def hot_shares(plan: Plan) -> list[dict[str, float]]:
    """What 5, 10 and 20 % of the bytes of the lists, hottest first, are worth: ``bytes_share``, ``lists_share``,
    ``probes_share`` and ``work_share`` of queries that did not choose the order."""
    analysis = plan.analysis
    shares = access_shares(analysis)
    nbytes = np.concatenate(([0.0], np.cumsum(analysis.profile.list_bytes[analysis.curve.order], dtype=np.float64)))
    found = []
    for share in _SHARES:
        lists = float(np.interp(share, nbytes / nbytes[-1], shares.lists))
        found.append(
            {
                "bytes_share": share,
                "lists_share": lists,
                "probes_share": shares.at(lists, shares.held_accesses),
                "work_share": shares.at(lists, shares.held_work),
            }
        )
    return found


def acts_of_demo(
    plan: Plan,
    same: Mapping[str, Any],
    lookahead: Mapping[str, Any] | None,
    projection: Mapping[str, Any] | None,
    load: Sequence[Mapping[str, Any]],
    device: str,
) -> list[Act]:
    """
    Args:
        same: fields of :class:`hybridindex.demo.same_answers.SameAnswers`.
        lookahead: fields of :class:`hybridindex.demo.same_answers.Lookaheads`.
        projection: fields of :class:`hybridindex.demo.projection.Projection`; None: ``load`` was measured on a GPU.
        load: ``policy``, ``rate``, ``attainment`` and ``device_bytes`` of each load; ``device``: where.
    """
    buys = _measured(plan, load, device) if projection is None else _projected(projection)
    return [_hot(plan), _same(same, lookahead), buys]


def _hot(plan: Plan) -> Act:
    rows = [tuple(f"{each[name]:.0%}" for name in each) for each in hot_shares(plan)]
    table = Table(header=("of the bytes", "of the lists", "of the probes", "of the scan work"), rows=tuple(rows))
    said = (
        "Queries of a real log probe few lists often. The hottest lists are worth this much to queries that did not "
        "choose them:"
    )
    picture = draw_access(plan.analysis)
    blocks = (text_block(said, heading="1. What is hot"), table_block(table), picture_block(picture))
    return Act(blocks=blocks, pictures=(picture,))


def _same(found: Mapping[str, Any], lookahead: Mapping[str, Any] | None) -> Act:
    low, high = found["hit_rates"]
    said = [
        f"{found['queries']:,} answers were compared with plain IVF search, while {found['plans']} changes of plan put "
        f"other lists on the device, chosen at random, and {found['lookaheads']} lookaheads brought more. "
        f"{found['differences']:,} differed. The device scanned from {low:.0%} to {high:.0%} of a query's bytes.",
        f"Plain IVF search itself finds {found['recall']:.1%} of the ten nearest of all rows, by comparing all of them "
        f"for {found['brute_queries']} queries: what is lost is lost to nprobe, not to placement.",
    ]
    if lookahead is not None:
        said.append(
            f"{lookahead['pairs']} times a passage was looked ahead with, and the one that continues it was searched: "
            f"with {format_bytes(lookahead['nbytes'])} brought at most, the device had "
            f"{lookahead['with_lookahead']:.0%} of the bytes of the second search instead of "
            f"{lookahead['without']:.0%}."
        )
    picture = _draw_same(found)
    texts = [text_block(each) for each in said[1:]]
    first = text_block(said[0], heading="2. The same answers, wherever lists are")
    return Act(blocks=(first, *texts, picture_block(picture)), pictures=(picture,))


def _draw_same(found: Mapping[str, Any]) -> Picture:
    answers = np.asarray(found["answers"], dtype=np.float64)
    with canvas(3.2) as drawing:
        (axes,) = drawing.panels()
        for at, moment in enumerate(found["changed_s"]):
            axes.axvline(moment, color=GREY, linewidth=0.8, alpha=0.7, label="change of plan" if at == 0 else None)
        axes.bar((np.arange(len(answers)) + 0.5) / 10, answers * 10, width=0.1, color=PALETTE[0], label="answers")
        axes.set_xlabel("seconds")
        axes.set_ylabel("answers per second")
        axes.legend(loc="lower right")
        drawn = drawing.drawn()
    return Picture(
        name=_SAME,
        title="Answers while lists move",
        caption=f"Every one was compared with plain IVF search: {found['differences']:,} differed. Lines: from there "
        "on other lists are on the device.",
        drawn=drawn,
    )


def _projected(found: Mapping[str, Any]) -> Act:
    said = (
        f"A projection for {found['hardware']} beside {found['llm']}, and an index of "
        f"{format_bytes(found['index_bytes'])}: the part of requests whose first token comes within "
        f"{found['slo_ms']:.0f} ms. Nothing of it was measured on that machine."
    )
    picture = _draw_attainment(
        found["attainment"],
        found["rates"],
        name=_PROJECTED,
        title="Attainment against rate, projected",
        caption=f"{found['hardware']} beside {found['llm']}, simulated from the profile of this run.",
        of="first token in time",
    )
    on_devices = {name: found["refused"].get(name) or format_bytes(found["device_bytes"][name])
                  for name in found["attainment"]}  # fmt: skip
    blocks = (
        text_block(said, heading="3. What it buys", lead="Projected."),
        picture_block(picture),
        table_block(_attainment_table(found["attainment"], found["rates"], on_devices)),
        table_block(Table(header=(), rows=tuple(_numbered(found["assumptions"]))), folded="What it assumes"),
    )
    return Act(blocks=blocks, pictures=(picture,))


def _measured(plan: Plan, load: Sequence[Mapping[str, Any]], device: str) -> Act:
    rates = list(dict.fromkeys(row["rate"] for row in load))
    attainment = {name: [row["attainment"] for row in load if row["policy"] == name]
                  for name in dict.fromkeys(row["policy"] for row in load)}  # fmt: skip
    on_devices = {row["policy"]: format_bytes(row["device_bytes"]) for row in load}
    said = (
        f"Measured on {device}, without an LLM beside it: the part of searches that were answered within "
        f"{plan.request.slo_ms:g} ms. What a design leaves of the device's memory is the LLM's."
    )
    picture = _draw_attainment(
        attainment,
        rates,
        name=_MEASURED,
        title="Attainment against rate, measured",
        caption=f"{device}; each design at the same rates.",
        of="answers in time",
    )
    blocks = (
        text_block(said, heading="3. What it buys", lead="Measured."),
        picture_block(picture),
        table_block(_attainment_table(attainment, rates, on_devices)),
    )
    return Act(blocks=blocks, pictures=(picture,))


def _numbered(sentences: Sequence[str]) -> list[tuple[str, str]]:
    return [(str(number), sentence) for number, sentence in enumerate(sentences, 1)]


def _attainment_table(
    attainment: Mapping[str, Sequence[float | None]], rates: Sequence[float], on_devices: Mapping[str, str]
) -> Table:
    rows = []
    for policy, values in attainment.items():
        shown = ["-" if value is None else f"{value:.0%}" for value in values]
        rows.append((policy, *shown, on_devices[policy]))
    return Table(header=("policy", *(f"{rate:g}/s" for rate in rates), "on the devices"), rows=tuple(rows))


def _draw_attainment(
    attainment: Mapping[str, Sequence[float | None]],
    rates: Sequence[float],
    *,
    name: str,
    title: str,
    caption: str,
    of: str,
) -> Picture:
    with canvas(4.0) as drawing:
        (axes,) = drawing.panels()
        for number, (policy, values) in enumerate(attainment.items()):
            seen = [(rate, value) for rate, value in zip(rates, values, strict=True) if value is not None]
            if seen:
                axes.plot(*zip(*seen, strict=True), "o-", color=PALETTE[number % len(PALETTE)], label=policy)
        axes.set_xlabel("requests per second")
        axes.set_ylabel(of)
        axes.set_ylim(-0.02, 1.02)
        show_percent(axes, x=False)
        axes.legend()
        drawn = drawing.drawn()
    return Picture(name=name, title=title, caption=caption, drawn=drawn)
