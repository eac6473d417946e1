"""Sphinx: ``make docs`` builds these pages without network, and warnings are errors."""

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.writers.html5 import HTML5Translator

from st_reba import __version__, modules
from st_reba.modules.stored import FixedWeights
from st_reba.recipes import every_row, rows

project = "st_reba"
author = "The st_reba authors"
copyright = "the st_reba authors, Apache-2.0"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"st_reba {__version__}"
html_static_path = ["static"]
html_css_files = ["pages.css"]
# Browsers draw MathML themselves: a page needs no script and no network.
html_math_renderer = "mathml"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


class Recipes(SphinxDirective):
    """The table of all recipes, made of their rows whenever the pages are."""

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(rows.__file__)
        lines = ["| recipe | `--recipe` | pooling | what is read | passes |", "|---|---|---|---|---|"]
        for row in every_row():
            page = f"[{row.name}](./methods/{row.page}.md)"
            lines.append(f"| {page} | `{row.key}` | {', '.join(row.poolings)} | {row.description} | {row.cost} |")
        return self.parse_text_to_nodes("\n".join(lines))


class Modules(SphinxDirective):
    """The reference of each public class that reads a model."""

    def run(self) -> list[nodes.Node]:
        shown = [
            f".. autoclass:: st_reba.modules.{module.__name__}\n   :members:\n"
            for module in (getattr(modules, name) for name in modules.__all__)
            if not issubclass(module, FixedWeights)
        ]
        self.env.note_dependency(rows.__file__)
        return self.parse_text_to_nodes("```{eval-rst}\n" + "\n".join(shown) + "```\n")


def inline_math(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def displayed_math(self: HTML5Translator, node: nodes.math_block) -> None:
    self.body.append(self.starttag(node, "div", CLASS="math"))
    self.body.append(convert(node.astext(), display="block"))
    self.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (inline_math, None), (displayed_math, None))
    app.add_directive("recipes", Recipes)
    app.add_directive("modules", Modules)
