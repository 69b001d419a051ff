"""Picture of a load test: latency percentiles and attainment by policy and rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybridindex.report.csv_data import NAMED_PLACES
from hybridindex.report.rows import LoadRow
from hybridindex.report.style import (
    GREY,
    INK,
    MARKERS,
    PALETTE,
    Picture,
    canvas,
    plain_label,
    show_percent,
    show_plain_log,
)

__all__ = ["draw_load"]

_PERCENTILES = ("p50", "p95", "p99")


def draw_load(rows: Sequence[LoadRow], *, slo_ms: float, percentile: float) -> Picture:
    """Every policy at every rate: p50, p95, p99, and the share of requests answered within the SLO."""
    if not rows:
        caption = "No load test was run for this report: hybridindex bench runs one."
        return Picture(name="load", title="Under load", caption=caption, drawn=None)
    rates = sorted({row.rate for row in rows})
    policies = list(dict.fromkeys(row.policy for row in rows))
    gap = 0.8 / max(len(policies), 1)
    with_attainment = any(row.attainment is not None for row in rows)
    with canvas(4.6) as drawing:
        from matplotlib.lines import Line2D

        panels = drawing.panels(2 if with_attainment else 1, widths=(3, 2) if with_attainment else None)
        latency = panels[0]
        for place, policy in enumerate(policies):
            color = PALETTE[place % len(PALETTE)]
            at = [
                (rates.index(row.rate) + (place - (len(policies) - 1) / 2) * gap, row)
                for row in rows
                if row.policy == policy
            ]
            for x, row in at:
                seen = [v for v in (row.p50_ms, row.p95_ms, row.p99_ms) if _drawable(v)]
                if seen:
                    latency.vlines(x, min(seen), max(seen), color=color, linewidth=2.4, alpha=0.5, zorder=2)
            for name, marker in zip(_PERCENTILES, MARKERS, strict=False):
                points = [(x, value) for x, row in at if _drawable(value := getattr(row, f"{name}_ms"))]
                if points:
                    latency.plot(
                        *zip(*points, strict=True),
                        marker,
                        color=color,
                        markersize=7,
                        markeredgecolor="white",
                        zorder=3,
                        label=plain_label(f"{policy} {name}"),
                    )
            met = [(x, row.attainment) for x, row in at if row.attainment is not None]
            if met:
                xs, shares = zip(*met, strict=True)
                bars = panels[1].bar(xs, shares, width=gap * 0.9, color=color, zorder=2, label=plain_label(policy))
                if len(rates) * len(policies) <= 8:
                    panels[1].bar_label(bars, labels=[f"{share:.0%}" for share in shares], fontsize=8, padding=2)
        latency.axhline(slo_ms, color=INK, linestyle="--", linewidth=1.2)
        latency.annotate(
            f"SLO {slo_ms:g} ms",
            (0.0, slo_ms),
            xycoords=("axes fraction", "data"),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=8.5,
        )
        latency.margins(y=0.12)
        show_plain_log(latency, "y")
        latency.set_ylabel("latency from due time (ms)")
        latency.set_title("Latency: p50, p95, p99")
        if with_attainment:
            panels[1].axhline(percentile / 100, color=INK, linestyle="--", linewidth=1.2, zorder=3)
            panels[1].set_ylim(0, 1.12)
            panels[1].set_yticks([0, 0.25, 0.5, 0.75, 1.0])
            show_percent(panels[1], x=False)
            panels[1].set_title(f"Within the SLO (goal {percentile:g}%)")
        for axes in panels:
            axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
            axes.xaxis.set_gid(NAMED_PLACES)
            axes.set_xlim(-0.6, len(rates) - 0.4)
            axes.grid(visible=False, axis="x")
            axes.set_xlabel("offered requests/s")
        handles = [
            Line2D([], [], color=PALETTE[i % len(PALETTE)], linewidth=6, label=plain_label(policy))
            for i, policy in enumerate(policies)
        ]
        handles += [
            Line2D([], [], color=GREY, marker=marker, linestyle="", label=name)
            for marker, name in zip(MARKERS, _PERCENTILES, strict=False)
        ]
        drawing.figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6))
        drawn = drawing.drawn()
    return Picture(
        name="load",
        title="Under load",
        caption="Requests arrive at random (Poisson) and do not wait for answers; latency counts from the moment a "
        "request was due. Each bar runs from the median to the 99th percentile on a logarithmic axis; shorter and "
        f"lower is better, and the dashed lines are the SLO and the share of requests ({percentile:g}%) that should "
        "meet it.",
        drawn=drawn,
    )


def _drawable(ms: float) -> bool:
    """On a logarithmic axis."""
    return math.isfinite(ms) and ms > 0
