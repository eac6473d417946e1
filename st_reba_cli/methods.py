"""What ``st-reba build --method`` calls the recipes that it offers; each other recipe has its key, for ``--recipe``."""

#: By the name of a method, the key of its recipe: see :mod:`st_reba.recipes.rows`, which takes long to import.
METHODS = {
    "classical": "classical",
    "echo": "echo-2",
    "reba": "reba-2",
    "echo-layers": "echo-2-layers",
    "bidirectional": "bidirectional-prompt",
    "refined-thought": "rt-2",
    "prompteol": "prompteol",
    "metaeol": "metaeol",
    "ck": "ck",
    "kv-rerouting": "kv-rerouting",
    "attention-pooling": "attention-pooling",
    "token-prepending": "token-prepending",
    "hierarchical-token-prepending": "token-prepending-blocks",
    "value-aggregation": "value-aggregation",
    "contrastive-prompting": "contrastive-prompting",
    "early-late": "early-late",
    "topic": "topic",
    "echo-topic": "echo-topic",
}
DEFAULT = "reba"
