"""Where matplotlib comes in: on demand, without its global state, with figures that a notebook shows by themselves."""

from __future__ import annotations

from functools import lru_cache
from io import BytesIO

from ..hints import install

# Okabe and Ito's colours, which people who do not see all colours can tell apart
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


def new_figure(width: float = 6.4, height: float = 4.0):
    """An empty figure; ImportError with the remedy where matplotlib is missing."""
    return _kind()(figsize=(width, height), layout="constrained")


@lru_cache(maxsize=None)
def _kind() -> type:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(f"this figure needs matplotlib, which is not installed: {install('demo')}") from None

    class ShownFigure(Figure):
        """A figure that draws itself where it is the result of a notebook's cell."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            FigureCanvasAgg(self)

        def _repr_png_(self) -> bytes:
            buffer = BytesIO()
            self.savefig(buffer, format="png", dpi=110)
            return buffer.getvalue()

    return ShownFigure


def label(axes, x: str, y: str, title: str = "") -> None:
    """Axis labels, title, a light grid, and a legend if something has a label."""
    axes.set_xlabel(x), axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25, linewidth=0.6)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)
