"""Labels of points in a figure that do not cover each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...evaluation.drawing import freeze

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox
    from numpy.typing import NDArray

# In points: how far a label may stand from its point, from where on a line joins them, how much room a point takes.
_DISTANCES = (7, 13, 24, 36, 50, 66)
_JOINED = 24
_POINT = 6
# From the point towards the nearest point of the label's box, right and up; the nicest first.
_DIRECTIONS = ((1, 0), (-1, 0), (0.7, 0.7), (-0.7, 0.7), (0.7, -0.7), (-0.7, -0.7), (0, 1), (0, -1))


@dataclass(frozen=True)
class Label:
    """What stands beside a point.

    Attributes:
        text: On one line.
        x: Of the point, in the data's units.
        y: Likewise.
        bold: Whether it is set in bold.
    """

    text: str
    x: float
    y: float
    bold: bool = False


def place(
    axes: Axes, labels: Sequence[Label], points: Sequence[tuple[float, float]], *, line: str, ground: str
) -> None:
    """Put labels where they cover no point and no other label, as near to their own point as may be.

    Earlier labels choose first; one that finds no room within reach is left out.

    Args:
        axes: With everything else drawn; its limits and its place in the figure stay as they are from now on.
        labels: The most important first.
        points: All that must stay visible, in the data's units.
        line: Colour of the line from a label to its point, where it had to move away.
        ground: Colour of the figure's ground, which shines through lines that a label lies on.
    """
    from matplotlib.figure import Figure

    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    freeze(figure)
    to_data = axes.transData.inverted()
    # Over the intervals, under the points.
    backing = {"facecolor": ground, "alpha": 0.8, "edgecolor": "none", "pad": 1}
    taken: list[Bbox] = []
    centres = axes.transData.transform(points)
    for label in labels:
        weight = "bold" if label.bold else "normal"
        text = axes.text(label.x, label.y, label.text, va="bottom", fontweight=weight, bbox=backing, zorder=2.5)
        own = axes.transData.transform(np.array([label.x, label.y]))
        size = np.array(text.get_window_extent().size)
        spot = _free_spot(own, size, centres, taken, axes.get_window_extent(), figure.dpi / 72)
        if spot is None:
            text.remove()
            continue
        taken.append(spot.box)
        text.set_position(tuple(to_data.transform(spot.box.p0)))
        if spot.joined:
            axes.plot(*to_data.transform([own, spot.near]).T, color=line, linewidth=0.8, zorder=2)


@dataclass(frozen=True)
class _Spot:
    """Where a label may stand, the end nearest to its point, and whether a line should join the two; in pixels."""

    box: Bbox
    near: NDArray[Any]
    joined: bool


def _free_spot(
    own: NDArray[Any], size: NDArray[Any], points: NDArray[Any], taken: Sequence[Bbox], room: Bbox, pixels: float
) -> _Spot | None:
    """The nearest spot that covers nothing on the way or there; without a line, one nearest to its own point."""
    from matplotlib.path import Path
    from matplotlib.transforms import Bbox

    for distance in _DISTANCES:
        for right, up in _DIRECTIONS:
            near = own + np.array([right, up]) * distance * pixels
            # A label right of its point begins there, one left of it ends there, one above or below is centred.
            box = Bbox.from_bounds(*(near - size * (0.5 - 0.5 * np.sign([right, up]))), *size)
            inside = (box.p0 >= room.p0).all() and (box.p1 <= room.p1).all()
            gaps = np.linalg.norm(np.maximum(0, np.maximum(box.p0 - points, points - box.p1)), axis=1)
            joined = distance >= _JOINED
            clear = _POINT * pixels / 2 if joined else np.linalg.norm(near - own) - 1e-6
            free = not any(box.overlaps(other) or Path([own, near]).intersects_bbox(other) for other in taken)
            if inside and free and (gaps >= clear).all() and not (joined and _passes(own, near, points, pixels)):
                return _Spot(box, near, joined)
    return None


def _passes(own: NDArray[Any], near: NDArray[Any], points: NDArray[Any], pixels: float) -> bool:
    """Whether a line from a point would touch another one."""
    others = points[np.linalg.norm(points - own, axis=1) > 1]
    on_line = np.linspace(own, near, 12)
    gaps = np.linalg.norm(others[:, None] - on_line[None], axis=2)
    return bool((gaps < _POINT * pixels / 2).any())
