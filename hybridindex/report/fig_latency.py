"""Pictures of the latency model: fits with their samples, and predictions against measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hybridindex.partitioner.analysis import Analysis
from hybridindex.report.chart_data import StageFit, TimingCheck, batch_check, scan_check, stage_fit
from hybridindex.report.style import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    VERMILLION,
    Picture,
    canvas,
    show_plain_log,
    show_seconds,
)
from hybridindex.types import F64

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_latency_fit", "draw_prediction_check"]

#: Larger ratios are drawn at the edge, so that one interrupted run does not compress the others.
_MOST = 8.0


def draw_latency_fit(analysis: Analysis) -> Picture:
    """Coarse quantization, host scan and, by codes, exact distances against batch size, with no resident list."""
    fits = [
        (title, fit, color)
        for stage, title, color in (
            ("coarse", "Coarse quantization", BLUE),
            ("host_scan", "Host scan, nothing resident", VERMILLION),
            ("rerank", "Exact distances of all candidates", GREEN),
        )
        if (fit := stage_fit(analysis, stage)) is not None
    ]
    if not fits:
        caption = "Full host scans and coarse quantization were not measured by batch size."
        return Picture(name="latency-fit", title="Host latency by batch", caption=caption, drawn=None)
    with canvas(4.0) as drawing:
        for axes, (title, fit, color) in zip(drawing.panels(len(fits)), fits, strict=True):
            _fit_panel(axes, title, fit, color)
        drawn = drawing.drawn()
    profile = analysis.profile
    top = int(min(fit.measured_to for _, fit, _ in fits))
    return Picture(
        name="latency-fit",
        title="Host latency by batch",
        caption=f"Dots are timed runs ({profile.threads} thread{'s' if profile.threads != 1 else ''}, "
        f"{profile.scanner}), lines the fitted medians: coarse quantization is piecewise linear in the batch size, the "
        f"scan follows its bytes ({analysis.latency.host.model.name} model). Dashed, on grey: beyond batch {top:,} "
        "nothing was measured, and every prediction there is marked as extrapolated. Both axes are logarithmic.",
        drawn=drawn,
    )


def _fit_panel(axes: Axes, title: str, fit: StageFit, color: str) -> None:
    inside = fit.batch <= fit.measured_to
    beyond = fit.batch >= fit.measured_to
    axes.axvspan(fit.measured_to, fit.batch[-1], color="#f2f2f2", zorder=0)
    axes.plot(
        fit.sample_batch, fit.sample_s, "o", color=color, alpha=0.4, markeredgewidth=0, label="timed run", zorder=2
    )
    axes.plot(fit.batch[inside], fit.fit_s[inside], color=INK, label="fit", zorder=3)
    axes.plot(fit.batch[beyond], fit.fit_s[beyond], "--", color=INK, label="extrapolated", zorder=3)
    axes.set_xlim(min(fit.sample_batch.min(), 1) * 0.85, fit.batch[-1])
    show_plain_log(axes, "x", base=2)
    show_seconds(axes, "y")
    axes.set_xlabel("batch size (queries)")
    axes.set_ylabel("time of a batch")
    axes.set_title(title)
    axes.legend(loc="upper left")


def draw_prediction_check(analysis: Analysis) -> Picture:
    """Predicted against measured time: host scans that skip resident lists, and hybrid batches if they were timed."""
    checks = [
        (title, check)
        for title, check in (
            ("Host scan beside resident lists", scan_check(analysis)),
            ("Whole hybrid batch", batch_check(analysis)),
        )
        if check is not None
    ]
    if not checks:
        caption = "Scans with resident lists masked were not measured."
        return Picture(name="latency-check", title="Predicted against measured latency", caption=caption, drawn=None)
    words = []
    with canvas(3.9) as drawing:
        panels = drawing.panels(2)
        for axes, (title, check) in zip(panels, checks, strict=False):
            _check_panel(axes, title, check)
            words.append(
                f"{title}: {check.measured_s.size:,} runs, median relative error "
                f"{float(np.median(check.relative_errors)):.0%}, {check.within_band:.0%} within ±20%."
            )
        if len(checks) == 1:
            _ratio_panel(panels[1], checks[0][1])
        colors = panels[0].collections[-1]
        bar = drawing.figure.colorbar(colors, ax=panels, pad=0.02, format=lambda v, _: f"{v:.0%}")
        bar.set_label("resident lists")
        drawn = drawing.drawn()
    model = analysis.latency.host
    return Picture(
        name="latency-check",
        title="Predicted against measured latency",
        caption=f"Each dot is one timed run; on the line the prediction is exact, the grey band is ±20%. "
        f"{' '.join(words)} The scan model was fitted to this machine's runs; on runs it had not seen, its median "
        f"error was {model.errors[model.model.name]:.1%} (cross-validation).",
        drawn=drawn,
    )


def _check_panel(axes: Axes, title: str, check: TimingCheck) -> None:
    both = np.concatenate((check.predicted_s, check.measured_s))
    both = both[both > 0]
    low, high = float(both.min()) / 1.4, float(both.max()) * 1.4
    line = np.array([low, high])
    band = axes.fill_between(line, line * 0.8, line * 1.2, color=FAINT, alpha=0.8, linewidth=0, zorder=1, label="±20%")
    axes.plot(line, line, color=GREY, linewidth=1, zorder=2, label="as predicted")
    _scatter(axes, np.maximum(check.predicted_s, low), check.measured_s, check.coverage)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    show_seconds(axes, "x")
    show_seconds(axes, "y")
    axes.set_xlabel("predicted")
    axes.set_ylabel("measured")
    axes.set_title(title)
    axes.legend(handles=[band], loc="upper left")


def _scatter(axes: Axes, x: F64, y: F64, coverage: F64) -> None:
    """Dots (m,) coloured by coverage."""
    top = max(float(coverage.max()), 0.01)
    axes.scatter(
        x,
        y,
        c=coverage,
        cmap="cividis",
        vmin=0.0,
        vmax=top,
        s=16,
        alpha=0.7,
        linewidths=0,
        zorder=3,
        label="timed run",
    )


def _ratio_panel(axes: Axes, check: TimingCheck) -> None:
    """Measured over predicted time by batch size: shows where a model is wrong, and in which direction."""
    axes.axhspan(1 - 0.2, 1 + 0.2, color=FAINT, alpha=0.8, linewidth=0, zorder=1)
    axes.axhline(1.0, color=GREY, linewidth=1, zorder=2)
    ratio = check.measured_s / np.maximum(check.predicted_s, 1e-12)
    _scatter(axes, check.batch, np.clip(ratio, 1 / _MOST, _MOST), check.coverage)
    far = min(max(float(np.abs(np.log2(np.maximum(ratio, 1e-12))).max()), 1.0), np.log2(_MOST)) * 1.08
    axes.set_ylim(2.0**-far, 2.0**far)
    show_plain_log(axes, "y", base=2)
    show_plain_log(axes, "x", base=2)
    axes.set_xlabel("batch size (queries)")
    axes.set_ylabel("measured / predicted")
    axes.set_title("The same, by batch size")
