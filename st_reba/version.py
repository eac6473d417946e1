"""Version, and requirements of saved models."""

__version__ = "1.0.0"

#: Value of ``requirements`` in a model's config_sentence_transformers.json, which ST checks before it loads a module.
_REASON = "A module of the model is part of st_reba; import st_reba before loading it."
REQUIREMENT = {"st_reba": {"specifier": f">={__version__}", "reason": _REASON}}
