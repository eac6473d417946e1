"""Drawing without a display, and without pyplot's global state."""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE = "#2a6fbb"
ORANGE = "#d9661f"
GREY = "#9a9a9a"
PALE = "#94b8e0"
INK = "#1f2328"
MUTED = "#59636e"
GRID = "#e4e4e4"
SURFACE = "#ffffff"

_FALLBACKS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Source Han Sans SC", "PingFang SC", "Hiragino Sans GB", "Heiti SC",
    "Microsoft YaHei", "SimHei", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Arial Unicode MS",
)  # fmt: skip


@contextmanager
def drawing_style(size: float = 11) -> Iterator[None]:
    """Fonts and colours of a report's figures: text is text (no formulas), in any script there is a font for.

    Args:
        size: Of the text, in points.
    """
    from matplotlib import rc_context

    settings: Any = {
        # Where an SVG is shown there may be none of them.
        "font.family": [*_families(), "sans-serif"],
        "font.size": size,
        "axes.titlesize": size + 1,
        "axes.edgecolor": GREY,
        "axes.labelcolor": MUTED,
        "axes.titlecolor": INK,
        "axes.unicode_minus": True,
        "legend.fontsize": size - 1,
        "legend.labelcolor": MUTED,
        "svg.fonttype": "none",
        # The same page each time.
        "svg.hashsalt": "st_reba",
        "text.color": INK,
        "text.parse_math": False,
        "xtick.color": GREY,
        "xtick.labelcolor": MUTED,
        "ytick.color": GREY,
        "ytick.labelcolor": MUTED,
    }
    with rc_context(settings), warnings.catch_warnings():
        # An SVG is set by the browser, which has other fonts; elsewhere `drawable` has its say.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def freeze(figure: Figure) -> None:
    """Lay a figure out now, and once: what is drawn later moves nothing."""
    figure.draw_without_rendering()
    figure.set_layout_engine(None)


def drawable(text: str) -> str:
    """The text with each run of characters that no installed font has as one ellipsis, instead of empty boxes."""
    known = _characters()
    shown = ""
    for character in text:
        if ord(character) in known or character == "\n":
            shown += character
        elif not shown.endswith("…"):
            shown += "…"
    return shown


def printable(text: str, limit: int = 60) -> str:
    """The text as a figure has room for it: on one line, without control characters, which an SVG cannot hold.

    Args:
        text: Anything.
        limit: Characters, at most; what is longer ends in an ellipsis.
    """
    clean = "".join(" " if unicodedata.category(character) in ("Cc", "Cs", "Cn") else character for character in text)
    line = " ".join(clean.split())
    return line if len(line) <= limit else f"{line[: limit - 1].rstrip()}…"


@lru_cache(maxsize=1)
def _families() -> list[str]:
    """matplotlib's own font and those for other scripts that are installed here."""
    from matplotlib.font_manager import fontManager

    installed = set(fontManager.get_font_names())
    return ["DejaVu Sans", *(family for family in _FALLBACKS if family in installed)]


@lru_cache(maxsize=1)
def _characters() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(code for family in _families() for code in get_font(findfont(family)).get_charmap())
