"""The most that a model's files may ask for, far above what any model has: more is a mistake or an attack."""

#: Layers. The deepest of language models have some hundred.
MAX_LAYERS = 1024
#: Experts in a layer. Some models have several hundred.
MAX_EXPERTS = 4 * MAX_LAYERS
#: Labels of a classifier, for each of which transformers keeps a name. Some have some tens of thousands.
MAX_LABELS = 2**16
#: Any size, and positions.
MAX_SIZE = 2**31
#: Tokens. The largest vocabularies have a quarter of a million.
MAX_TOKENS = 2**24
