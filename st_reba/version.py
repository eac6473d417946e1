"""The version, and what a saved model asks of the machine that loads it."""

__version__ = "1.0.0.dev0"

#: For ``requirements`` in a saved model's config_sentence_transformers.json: ST checks it before it loads anything.
REQUIREMENT = {
    "st_reba": {
        "specifier": f">={__version__}",
        "reason": "A module of the model is part of st_reba; import st_reba before loading it.",
    }
}
