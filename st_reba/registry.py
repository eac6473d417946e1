"""Lets a plain ``SentenceTransformer(path)`` resolve our classes, and no others.

sentence-transformers 6 refuses module classes from outside its namespace unless ``trust_remote_code=True``, which would
also let the backbone run code from the repository. ``import st_reba`` is the user's own statement of trust in this
package and in nothing else, so exactly our references are added to the mapping ST consults first. Nothing is imported
on a configuration's behalf.

``_module_classes`` is a private name of ST's (6.0 and later); 5.x loads installed classes by itself. Should a later ST
drop it, loading asks for ``trust_remote_code=True``, as it does without the import. tests/test_saving.py guards it.
"""

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Module

from .card import STRebaCardData
from .modules import PUBLIC_MODULES

#: Whether this ST checks a saved model's ``requirements`` and tells modules when their model is complete (6.0 on).
REQUIREMENTS_ARE_CHECKED = MODULES_HEAR_OF_THEIR_MODEL = hasattr(Module, "on_model_ready")

MODULE_CLASSES = {f"{module.__module__}.{module.__name__}": module for module in PUBLIC_MODULES}

_MAPPING = "_module_classes"


def register() -> None:
    """Add our module classes to the mapping that ST's model families share."""
    for family in SentenceTransformer.__mro__:
        known = vars(family).get(_MAPPING)
        if known is not None:
            setattr(family, _MAPPING, {**known, **MODULE_CLASSES})
            break
    if not MODULES_HEAR_OF_THEIR_MODEL:
        # ST 5 does not tell a module that its model is complete, so there the card class is set for all models; for
        # those without our modules it writes ST's own card.
        SentenceTransformer.model_card_data_class = STRebaCardData
