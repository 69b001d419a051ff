"""The look of every picture: size, palette, axes, units; and rendering to PNG bytes.

Uses matplotlib's object-oriented interface with the Agg canvas, never pyplot and its global figures. Settings hold only
inside :func:`canvas`, under a lock, because matplotlib keeps them in one process-wide dictionary.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridindex.errors import MissingDependencyError, how_to_install
from hybridindex.report.csv_data import csv_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BLUE",
    "FAINT",
    "GREEN",
    "GREY",
    "INK",
    "MARKERS",
    "ORANGE",
    "PALETTE",
    "PURPLE",
    "VERMILLION",
    "Canvas",
    "Drawn",
    "Picture",
    "byte_unit",
    "canvas",
    "legend_below",
    "plain_label",
    "readable_seconds",
    "require_matplotlib",
    "show_bytes",
    "show_percent",
    "show_plain_log",
    "show_seconds",
]

#: Okabe and Ito's colours, which can be told apart with any colour vision.
BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#AA4499", "#56B4E9"
PALETTE = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY)
INK, GREY, FAINT = "#222222", "#767676", "#d9d9d9"
MARKERS = ("o", "s", "^", "D", "v", "P")

WIDTH_IN = 8.0
#: Twice the 800 CSS pixels at which 8 inches are shown, for high-resolution screens.
DPI = 200

#: Typed as Any because matplotlib types the keys as one long literal.
_SETTINGS: Any = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.usetex": False,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": False,
    "axes.unicode_minus": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.bbox": None,
}
_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A figure, and the numbers that it shows."""

    png: bytes
    #: As of :func:`hybridindex.report.csv_data.csv_of`.
    csv: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One figure of the report, or why there is none."""

    #: File name without suffix.
    name: str
    title: str
    #: Plain text for the reader.
    caption: str
    #: ``None``: not measured; ``caption`` says what is missing.
    drawn: Drawn | None


class Canvas:
    """One figure while it is drawn. Not thread-safe."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure

    def panels(self, columns: int = 1, *, widths: Sequence[float] | None = None) -> list[Axes]:
        """``columns`` axes side by side."""
        made = self.figure.subplots(1, columns, squeeze=False, width_ratios=widths)
        return list(made[0])

    def png(self) -> bytes:
        """The figure as a PNG file without metadata, so that equal figures give equal bytes."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
        return buffer.getvalue()

    def drawn(self) -> Drawn:
        return Drawn(png=self.png(), csv=csv_of(self.figure))


def require_matplotlib() -> None:
    """Raises MissingDependencyError, naming the extra, when matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"pictures need matplotlib: {how_to_install('report')}") from error


@contextmanager
def canvas(height_in: float = 4.2) -> Iterator[Canvas]:
    """An empty figure, 8 inches wide. Render it inside the context: the settings end with it."""
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with _LOCK, matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        FigureCanvasAgg(figure)
        yield Canvas(figure)


def plain_label(text: str, limit: int = 32) -> str:
    """``text`` as a label: short, without TeX, and only with characters that the font has."""
    kept = "".join(c if c.isprintable() and ord(c) < 0x250 else "?" for c in text)
    if len(kept) > limit:
        kept = kept[: limit - 3] + "..."
    kept = kept.replace("$", r"\$")
    return f" {kept}" if kept.startswith("_") else kept  # matplotlib hides labels that begin with an underscore


def byte_unit(largest: float) -> tuple[float, str]:
    """(divisor, name) of the largest unit that ``largest`` bytes reach."""
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024**power:
            return float(1024**power), name
    return 1.0, "bytes"


def readable_seconds(seconds: float) -> str:
    """0.00123 -> "1.23 ms"."""
    if not math.isfinite(seconds):
        return "-"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(seconds) * factor >= 1 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


def show_percent(axes: Axes, *, x: bool = True, y: bool = True) -> None:
    """Fractions on linear axes read as percent."""
    from matplotlib.ticker import PercentFormatter

    for wanted, axis in ((x, axes.xaxis), (y, axes.yaxis)):
        if wanted:
            axis.set_major_formatter(PercentFormatter(1.0, decimals=None, symbol="%"))


def show_plain_log(axes: Axes, which: str, base: int = 10) -> None:
    """A log axis with plain numbers as ticks (1, 2, 5, 10 ...) instead of powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    subs: tuple[float, ...]
    axis = axes.xaxis if which == "x" else axes.yaxis
    if which == "x":
        axes.set_xscale("log", base=base)
    else:
        axes.set_yscale("log", base=base)
    low, high = sorted(axes.get_xlim() if which == "x" else axes.get_ylim())
    decades = math.log10(high / low) if low > 0 else 1.0
    if base == 2:
        step, subs = (2 if decades < 2.2 else 4 if decades < 4.4 else 16), (1.0,)
    elif decades < 0.5:
        step, subs = base, (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
    elif decades < 0.9:
        step, subs = base, (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    else:
        step, subs = base, (1.0,) if decades > 3.2 else (1.0, 3.0) if decades > 2 else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(base=step, subs=subs, numticks=16))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def show_seconds(axes: Axes, which: str) -> None:
    """A log axis of seconds whose ticks have their own unit: 10 µs, 1 ms."""
    from matplotlib.ticker import FuncFormatter

    show_plain_log(axes, which)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: readable_seconds(value)))


def show_bytes(axes: Axes) -> None:
    """A log x axis of bytes whose ticks have their own unit: 4 KiB, 1 MiB."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=16, numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _readable_bytes(value)))


def _readable_bytes(nbytes: float) -> str:
    divisor, unit = byte_unit(nbytes)
    return f"{nbytes / divisor:g} {unit}"


def legend_below(axes: Axes, columns: int, *, title: str | None = None) -> None:
    """A legend below the axes."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=columns, title=title, handlelength=2.2)
