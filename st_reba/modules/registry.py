"""Lets a plain ``SentenceTransformer(path)`` resolve our classes, and no others.

sentence-transformers 6 refuses module classes from outside its namespace unless ``trust_remote_code=True``, which would
also let the backbone run code from the repository. ``import st_reba`` is the user's own statement of trust in this
package and in nothing else, so exactly our references are added to what ST knows, and those of packages that the user
imports and that register theirs (:func:`st_reba.register`). Nothing is imported on a configuration's behalf.
"""

from torch import nn

from ..hub import compat

#: What is known, by the reference that a modules.json has.
MODULE_CLASSES: dict[str, type[nn.Module]] = {}


def register(*modules: type[nn.Module]) -> None:
    """Make module classes known to ST."""
    MODULE_CLASSES.update({f"{module.__module__}.{module.__name__}": module for module in modules})
    compat.make_known(MODULE_CLASSES)
