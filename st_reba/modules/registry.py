"""Lets a plain ``SentenceTransformer(path)`` resolve our classes, and no others.

sentence-transformers 6 refuses module classes from outside its namespace unless ``trust_remote_code=True``, which would
also let the backbone run code from the repository. ``import st_reba`` is the user's own statement of trust in this
package and in nothing else, so exactly our references are added to what ST knows. Nothing is imported on a
configuration's behalf.
"""

from ..hub import compat
from ..hub.card import STRebaCardData
from ..hub.compat import MODULES_HEAR_OF_THEIR_MODEL, REQUIREMENTS_ARE_CHECKED
from . import PUBLIC_MODULES

__all__ = ["MODULES_HEAR_OF_THEIR_MODEL", "MODULE_CLASSES", "REQUIREMENTS_ARE_CHECKED", "register"]

MODULE_CLASSES = {f"{module.__module__}.{module.__name__}": module for module in PUBLIC_MODULES}


def register() -> None:
    """Make our module classes known to ST, and our card the card of models that have them."""
    compat.make_known(MODULE_CLASSES)
    # For models without our modules it writes ST's own card.
    compat.make_default_card(STRebaCardData)
