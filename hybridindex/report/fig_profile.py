"""Pictures of the profile: access skew, recall, transfers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hybridindex.partitioner.analysis import Analysis
from hybridindex.partitioner.models.scan_models import relative_nnls
from hybridindex.report.chart_data import AccessShares, access_shares
from hybridindex.report.style import (
    BLUE,
    FAINT,
    GREY,
    INK,
    MARKERS,
    PALETTE,
    VERMILLION,
    Picture,
    byte_unit,
    canvas,
    plain_label,
    show_bytes,
    show_percent,
    show_plain_log,
    show_seconds,
)
from hybridindex.types import Profile

__all__ = ["draw_access", "draw_recall", "draw_transfers"]

#: VectorLiteRAG, section III: share of accesses on the hottest 20% of lists.
_PAPER_SHARE = 0.2
_PAPER = (("ORCAS", 0.93), ("Wiki-All", 0.59))
#: Of a label there, in shares of lists.
_LABEL_WIDTH = 0.17


def draw_access(analysis: Analysis) -> Picture:
    """Cumulative share of accesses and of scan work against the share of lists, hottest first."""
    shares = access_shares(analysis)
    held = analysis.profile.access.held_probes.shape[0]
    fit = analysis.profile.access.fit_probes.shape[0]
    with canvas(4.3) as drawing:
        (axes,) = drawing.panels()
        axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1.2, zorder=1, label="no skew")
        # Below the diagonal: the hottest lists come first, so that no curve is there.
        axes.text(0.70, 0.61, "no skew", color=GREY, fontsize=8.5)
        curves = []
        for label, values, color, style in (
            ("accesses, held-back queries", shares.held_accesses, BLUE, "-"),
            ("accesses, the queries that chose the order", shares.fit_accesses, BLUE, ":"),
            ("scan work (bytes), held-back queries", shares.held_work, VERMILLION, "-"),
            ("scan work (bytes), the queries that chose the order", shares.fit_work, VERMILLION, ":"),
        ):
            curves += axes.plot(shares.lists, values, style, color=color, label=label)
        axes.axvline(_PAPER_SHARE, color=GREY, linewidth=1, linestyle="--", zorder=1)
        for name, value in _PAPER:
            axes.plot(
                _PAPER_SHARE, value, "_", color=INK, markersize=13, markeredgewidth=2, zorder=4, label=f"{name} (paper)"
            )
            leftwards = _passes(shares, value)
            axes.annotate(
                f"{name} {value:.0%} (paper)",
                (_PAPER_SHARE, value),
                xytext=(-9 if leftwards else 9, 0),
                textcoords="offset points",
                ha="right" if leftwards else "left",
                va="center",
                fontsize=8,
                color=INK,
            )
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("share of lists, hottest first")
        axes.set_ylabel("cumulative share")
        axes.set_title("How unevenly lists are used")
        show_percent(axes)
        axes.legend(handles=curves, loc="lower right")
        drawn = drawing.drawn()
    excess = shares.at(_PAPER_SHARE, shares.fit_accesses) - shares.at(_PAPER_SHARE, shares.held_accesses)
    caption = (
        f"The hottest 20% of lists take {shares.at(_PAPER_SHARE, shares.held_accesses):.0%} of the accesses and "
        f"{shares.at(_PAPER_SHARE, shares.held_work):.0%} of the scan work of {held:,} held-back queries. The higher "
        f"the curve above the diagonal, the less memory a hit rate costs. Dotted: the {fit:,} queries that chose the "
        f"order, {_apart(excess)}; plans use the solid curves. The ticks at 20% are what the VectorLiteRAG paper "
        "reports for its data."
    )
    return Picture(name="access", title="Access skew", caption=caption, drawn=drawn)


def _passes(shares: AccessShares, value: float) -> bool:
    """Whether a curve goes through the place of a label at the right of the paper's line, at this height."""
    curves = (shares.held_accesses, shares.fit_accesses, shares.held_work, shares.fit_work)
    ends = (_PAPER_SHARE, _PAPER_SHARE + _LABEL_WIDTH)
    return any(shares.at(ends[0], c) - 0.03 < value < shares.at(ends[1], c) + 0.03 for c in curves)


def _apart(excess: float) -> str:
    points = abs(excess) * 100
    if points < 0.05:
        return "where the same lists take as much"
    return f"where the same lists take {points:.1f} points {'more' if excess > 0 else 'less'}"


def draw_recall(profile: Profile) -> Picture:
    """Recall and NDCG against nprobe."""
    points = sorted(profile.recall, key=lambda p: p.nprobe)
    if not points:
        caption = "Recall was not measured: the profile has no points of recall against nprobe."
        return Picture(name="recall", title="Answer quality", caption=caption, drawn=None)
    nprobe = [p.nprobe for p in points]
    with canvas(3.7) as drawing:
        (axes,) = drawing.panels()
        axes.plot(nprobe, [p.recall for p in points], "o-", color=BLUE, label=f"recall@{points[0].k}")
        axes.plot(nprobe, [p.ndcg for p in points], "s--", color=VERMILLION, label=f"NDCG@{points[0].k}")
        axes.axvline(profile.nprobe, color=INK, linewidth=1.2)
        rightwards = profile.nprobe < np.sqrt(nprobe[0] * nprobe[-1])
        axes.annotate(
            f"in use: nprobe {profile.nprobe}",
            (profile.nprobe, 0),
            xycoords=("data", "axes fraction"),
            xytext=(6, 8) if rightwards else (-6, 8),
            ha="left" if rightwards else "right",
            textcoords="offset points",
        )
        if len(nprobe) > 1:
            show_plain_log(axes, "x", base=2)
        lowest = min(min(p.recall, p.ndcg) for p in points)
        axes.set_ylim(max(0.0, lowest - 0.08), 1.01)
        axes.set_xlabel("nprobe (lists scanned per query)")
        axes.set_ylabel("against exact search")
        axes.set_title("Quality against lists scanned")
        show_percent(axes, x=False)
        axes.legend(loc="lower right" if rightwards else "upper left")
        drawn = drawing.drawn()
    chosen = [p for p in points if p.nprobe == profile.nprobe]
    at = (
        f"At nprobe {profile.nprobe} recall@{chosen[0].k} is {chosen[0].recall:.3f}, NDCG {chosen[0].ndcg:.3f}. "
        if chosen
        else f"nprobe {profile.nprobe} itself was not measured. "
    )
    return Picture(
        name="recall",
        title="Answer quality",
        caption=f"{at}Measured against {_reference(profile)} on {points[0].n_queries:,} held-back "
        "queries. Every other figure here holds for this nprobe; placement never changes answers.",
        drawn=drawn,
    )


def _reference(profile: Profile) -> str:
    """What recall was measured against, from the profile's notes."""
    noted = profile.notes.get("recall")
    reference = noted.get("reference") if isinstance(noted, Mapping) else None
    return reference if isinstance(reference, str) else "exact search over the same vectors"


def draw_transfers(profile: Profile) -> Picture:
    """Host-to-device copy time against bytes, with the fitted latency and bandwidth."""
    samples = [t for t in profile.transfers if t.nbytes > 0 and t.seconds > 0]
    if not samples:
        caption = "Transfers were not measured: no device took part in the profile."
        return Picture(name="transfers", title="Transfers", caption=caption, drawn=None)
    rates: list[str] = []
    with canvas(3.9) as drawing:
        (axes,) = drawing.panels()
        shown = []
        for place, (device, pinned) in enumerate(sorted({(t.device, t.pinned) for t in samples})):
            own = [t for t in samples if (t.device, t.pinned) == (device, pinned)]
            nbytes = np.array([t.nbytes for t in own], dtype=np.float64)
            seconds = np.array([t.seconds for t in own])
            (latency, per_byte), _ = relative_nnls(np.stack([np.ones_like(nbytes), nbytes], axis=1), seconds)
            memory = "pinned" if pinned else "pageable"
            speed = f"{1 / per_byte / 1024**3:.3g} GiB/s" if per_byte > 0 else "bandwidth not resolved"
            rates.append(f"{device}, {memory}: {latency * 1e6:.3g} µs + bytes at {speed}")
            color = PALETTE[place % len(PALETTE)]
            shown += axes.plot(
                nbytes,
                seconds,
                MARKERS[place % len(MARKERS)],
                color=color,
                alpha=0.55,
                markeredgewidth=0,
                label=f"{plain_label(device)}, {memory}: {speed}",
            )
            line = np.geomspace(nbytes.min(), nbytes.max(), 60)
            axes.plot(line, latency + per_byte * line, color=color, label=f"{plain_label(device)}, {memory}: fit")
        show_bytes(axes)
        show_seconds(axes, "y")
        axes.set_xlabel("bytes copied")
        axes.set_ylabel("time of one copy")
        axes.set_title("Copy time, host to device")
        axes.legend(handles=shown, loc="upper left")
        drawn = drawing.drawn()
    total, total_unit = byte_unit(max(t.nbytes for t in samples))
    return Picture(
        name="transfers",
        title="Transfers",
        caption="Time of a copy against its size; lines are latency plus bytes over bandwidth. "
        f"{'; '.join(rates)}. Measured up to {max(t.nbytes for t in samples) / total:.3g} {total_unit}.",
        drawn=drawn,
    )
