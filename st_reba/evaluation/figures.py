"""Drawing without a display, and without pyplot's global state."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE = "#2a6fbb"
ORANGE = "#d9661f"
GREY = "#9a9a9a"


def require_matplotlib() -> None:
    """Say what to install, before anything long is begun.

    Raises:
        ImportError: If matplotlib is missing.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ImportError(
            "Drawing needs matplotlib, which is not installed: pip install 'st_reba[report]', or matplotlib itself."
        ) from None


def layer_axes(layers: int, y_label: str, title: str) -> tuple[Figure, Axes]:
    """An empty figure with the layers 0 to ``layers`` - 1 on its x axis, as wide as they need.

    Raises:
        ImportError: If matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    width = 3.5 if layers == 1 else min(12.0, max(6.0, 0.3 * layers))
    figure = Figure(figsize=(width, 4.0), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(-0.6, layers - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    axes.set_xlabel("Layer (0: input embeddings)")
    axes.set_ylabel(y_label)
    axes.set_title(title, loc="left", fontsize="medium")
    axes.grid(axis="y", color="#e4e4e4")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
