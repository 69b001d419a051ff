"""Pictures of the decision: hit rate against coverage, device bytes against SLO."""

from __future__ import annotations

import numpy as np

from hybridindex.paging import format_bytes
from hybridindex.partitioner.plan import Plan
from hybridindex.partitioner.solver import rate_in_words
from hybridindex.report.chart_data import hit_rate_check, slo_need
from hybridindex.report.style import (
    BLUE,
    GREY,
    INK,
    MARKERS,
    PALETTE,
    VERMILLION,
    Picture,
    byte_unit,
    canvas,
    legend_below,
    show_percent,
    show_plain_log,
)

__all__ = ["draw_hit_rate", "draw_slo"]

_MODEL_WORDS = {"beta": "Beta", "empirical": "empirical", "beta_binomial": "Beta-binomial"}


def draw_hit_rate(plan: Plan) -> Picture:
    """Coverage against the mean and the batch-minimum hit rate, predicted and measured."""
    check = hit_rate_check(plan.analysis)
    if check is None:
        caption = "Too few held-back queries were profiled to predict from one half and measure on the other."
        return Picture(name="hit-rate", title="Hit rate by coverage", caption=caption, drawn=None)
    beta_apart = check.model != "beta"
    predicted = f"predicted ({_MODEL_WORDS[check.model]})"
    with canvas(5.0) as drawing:
        from matplotlib.lines import Line2D

        (axes,) = drawing.panels()
        handles = []
        for place, batch in enumerate(check.measured):
            color, marker = PALETTE[place], MARKERS[place]
            label = "mean (batch of 1)" if batch == 1 else f"slowest of {batch}"
            axes.plot(check.line_coverage, check.predicted[batch], color=color, label=f"{label}, {predicted}")
            if beta_apart:
                axes.plot(
                    check.line_coverage,
                    check.beta[batch],
                    ":",
                    color=color,
                    linewidth=1.5,
                    label=f"{label}, predicted (Beta)",
                )
            axes.plot(
                check.mark_coverage,
                check.measured[batch],
                marker,
                color=color,
                markeredgecolor="white",
                markersize=7,
                zorder=4,
                label=f"{label}, measured",
            )
            handles.append(Line2D([], [], color=color, marker=marker, markeredgecolor="white", label=label))
        handles.append(Line2D([], [], color=GREY, label=predicted))
        if beta_apart:
            handles.append(Line2D([], [], color=GREY, linestyle=":", label="predicted (Beta)"))
        handles.append(Line2D([], [], color=GREY, marker="o", linestyle="", label="measured"))
        axes.set_xlim(0, 1)
        if plan.resident_lists.size:
            axes.axvline(plan.coverage, color=INK, linewidth=1.2)
            handles.append(Line2D([], [], color=INK, linewidth=1.2, label=f"the plan: {plan.coverage:.1%}"))
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("coverage: share of lists on the devices, hottest first")
        axes.set_ylabel("hit rate, by bytes")
        axes.set_title("What a coverage serves")
        show_percent(axes)
        axes.legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4, handlelength=2.2, fontsize=8.5
        )
        drawn = drawing.drawn()
    own, beta = check.errors(check.predicted_at_marks), check.errors(check.beta_at_marks)
    none = "" if plan.resident_lists.size else " The plan keeps no list on a device."
    left = f" Batches of {', '.join(map(str, check.left_out))} need more queries." if check.left_out else ""
    compared = f"; the Beta model {np.median(beta):.3f} and {beta.max():.3f}" if beta_apart else ""
    return Picture(
        name="hit-rate",
        title="Hit rate by coverage",
        caption=f"Lines predict from {check.n_predict:,} queries, marks are measured on {check.n_measure:,} other "
        "queries, as the average over random batches; neither half chose which lists are hot. A batch waits for its "
        "slowest query, so the lower lines decide latency. Absolute error at the marks: "
        f"{_MODEL_WORDS[check.model]} model median {np.median(own):.3f}, worst {own.max():.3f}{compared}.{left}{none}",
        drawn=drawn,
    )


def draw_slo(plan: Plan) -> Picture:
    """Device bytes against SLO, with the budget and the plan."""
    need = slo_need(plan)
    request = plan.request
    met = need.points
    stage = "search" if request.slo_stage == "search" else "time to first token"
    budget = sum(request.budgets)
    x_low, x_high = need.low_ms, need.high_ms
    tallest = max([p.device_bytes for p in met] + [plan.device_bytes, 1])
    top = max(tallest, need.limit_bytes if need.limit_bytes <= 2.5 * tallest else 0) * 1.18
    scale, unit = byte_unit(top)
    with canvas(4.4) as drawing:
        (axes,) = drawing.panels()
        edge = need.smallest_slo_ms if need.smallest_slo_ms is not None else x_high
        axes.axvspan(
            x_low,
            edge,
            facecolor="#f0f0f0",
            edgecolor="#c4c4c4",
            hatch="//",
            linewidth=0,
            zorder=0,
            label="cannot be met within the budget",
        )
        if met:
            axes.step(
                [p.slo_ms for p in met],
                [p.device_bytes / scale for p in met],
                where="post",
                color=BLUE,
                label="fewest bytes that meet the SLO",
                zorder=3,
            )
        if budget <= top:
            axes.axhline(budget / scale, color=VERMILLION, linestyle="--", linewidth=1.4)
            axes.annotate(
                f"budget {format_bytes(budget)}",
                (1.0, budget / scale),
                xycoords=("axes fraction", "data"),
                xytext=(-4, 4),
                textcoords="offset points",
                ha="right",
                color=VERMILLION,
            )
        else:
            axes.annotate(
                f"budget {format_bytes(budget)}: above this picture ↑",
                (1.0, 1.0),
                xycoords="axes fraction",
                xytext=(-4, -4),
                textcoords="offset points",
                ha="right",
                va="top",
                color=VERMILLION,
            )
        axes.plot(
            request.slo_ms,
            plan.device_bytes / scale,
            "o" if plan.feasible else "X",
            color=INK,
            markersize=10,
            label="the plan" if plan.feasible else "the plan: best effort, SLO not met",
            zorder=5,
            clip_on=False,
        )
        axes.set_xlim(x_low, x_high)
        axes.set_ylim(0, top / scale)
        show_plain_log(axes, "x")
        axes.set_xlabel(f"SLO: {stage} at p{request.percentile:g}, queueing included (ms)")
        axes.set_ylabel(f"device memory ({unit})")
        axes.set_title("What an SLO costs")
        legend_below(axes, 3)
        drawn = drawing.drawn()
    load = f"at {rate_in_words(plan.rate_qps)}" if plan.rate_qps is not None else "for single queries"
    if need.smallest_slo_ms is not None:
        bound = f"Within the budget, SLOs from about {need.smallest_slo_ms:.3g} ms on can be met"
    else:
        bound = "Within the budget, no SLO in view can be met"
    how = (
        f" This plan's coverage was fixed at {request.coverage:.1%} rather than solved, so its point may lie off the "
        "curve."
        if request.coverage is not None
        else ""
    )
    return Picture(
        name="slo-bytes",
        title="SLO against device memory",
        caption=f"The fewest device bytes (pages and scratch) that meet each SLO {load}, solved as if memory had no "
        f"limit; the plan takes {format_bytes(plan.device_bytes)} for {request.slo_ms:g} ms. {bound}; hatched is "
        f"infeasible. To the right the curve falls to zero where the host alone is fast enough.{how}",
        drawn=drawn,
    )
