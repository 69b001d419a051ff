"""Picture of a simulation: latency of each policy as a distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridindex.report.style import GREY, INK, PALETTE, Picture, canvas, show_percent
from hybridindex.studies.simulator.compare import Compared

__all__ = ["draw_simulated"]


def draw_simulated(found: Sequence[Compared], *, slo_ms: float) -> Picture:
    """Cumulative distribution of TTFT, without an LLM of search time: one line per policy that could be simulated."""
    generated = any(one.outcome is not None and one.outcome.tpot_s is not None for one in found)
    what = "time to first token" if generated else "search time"
    with canvas(4.6) as drawing:
        (axes,) = drawing.panels()
        for number, one in enumerate(found):
            if one.outcome is None:
                continue
            seconds = np.sort(one.outcome.ttft_s[np.isfinite(one.outcome.ttft_s)])
            if not seconds.size:
                continue
            part = np.arange(1, seconds.size + 1) / one.outcome.n_requests
            style = "-" if number < len(PALETTE) else "--"
            axes.plot(seconds * 1e3, part, style, color=PALETTE[number % len(PALETTE)], label=one.policy)
        axes.axvline(slo_ms, color=INK, linestyle="--", linewidth=1.2)
        axes.annotate(f"SLO {slo_ms:g} ms", (slo_ms, 0.02), color=GREY, ha="right", rotation=90)
        axes.set_xscale("log")
        axes.set_xlabel(f"{what}, ms")
        axes.set_ylabel("requests")
        show_percent(axes, x=False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=9)
        drawn = drawing.drawn()
    return Picture(
        name="simulated",
        title=f"Simulated {what}",
        caption="Distribution over all simulated requests.",
        drawn=drawn,
    )
