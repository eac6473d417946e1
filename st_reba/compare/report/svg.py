"""A matplotlib figure as SVG inside an HTML page: light and dark with the page, set in its font."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from ...evaluation.drawing import BLUE, GREY, GRID, INK, MUTED, ORANGE, PALE, SURFACE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Colours of a figure, and the CSS variables that stand for them on a page.
VARIABLES = {
    BLUE: "--blue",
    ORANGE: "--orange",
    GREY: "--grey",
    PALE: "--pale",
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    SURFACE: "--surface",
}

#: An artist whose gid begins so has the rest as its tooltip.
TIP = "tip:"


def inline(figure: Figure, name: str, label: str) -> str:
    """An ``<svg>`` element to be put into HTML.

    Colours of :data:`VARIABLES` become those variables, text stays text, and an artist's tooltip (:data:`TIP`) shows
    when a pointer rests on it, without a script.

    Args:
        figure: Drawn under :func:`st_reba.evaluation.drawing.drawing_style`.
        name: Unlike that of any other figure on the page: letters, digits and hyphens.
        label: What a screen reader says in the figure's place.
    """
    buffer = io.StringIO()
    nothing: dict[str, None] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    root = ElementTree.fromstring(buffer.getvalue())
    _drop_styles(root)
    for element in root.iter():
        _localise(element, name)
    # The page says how large the figure is.
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.set("role", "img")
    root.set("aria-label", label)
    return ElementTree.tostring(root, encoding="unicode")


def _drop_styles(root: ElementTree.Element) -> None:
    """matplotlib's own style sheet would hold for the whole page."""
    for parent in root.iter():
        for child in [child for child in parent if _local(child.tag) in ("style", "metadata")]:
            parent.remove(child)


def _localise(element: ElementTree.Element, name: str) -> None:
    """Plain tag and attribute names as HTML has them, ids of this figure's own, colours of the page."""
    element.tag = _local(element.tag)
    element.attrib = {_local(key): value for key, value in element.attrib.items()}
    identifier = element.attrib.pop("id", "")
    if identifier.startswith(TIP):
        title = ElementTree.Element("title")
        title.text = identifier.removeprefix(TIP)
        element.insert(0, title)
    elif element.tag in ("path", "clipPath", "use", "g") and re.fullmatch(r"[\w.]+", identifier):
        element.set("id", f"{name}-{identifier}")
    for key, value in element.attrib.items():
        if key == "style":
            for colour, variable in VARIABLES.items():
                value = value.replace(colour, f"var({variable})")
        elif key == "clip-path":
            value = value.replace("url(#", f"url(#{name}-")
        elif key == "href" and value.startswith("#"):
            value = f"#{name}-{value[1:]}"
        element.attrib[key] = value


def _local(name: str) -> str:
    return name.rpartition("}")[2]
