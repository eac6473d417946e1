"""What the recipes are, in one line each, by their names in a comparison."""

from __future__ import annotations

import re

_RECIPES = (
    (r"Classical", "the last hidden states of one ordinary causal pass"),
    (r"Echo-(\d+)", "the text stands {} times, and is read in its last copy"),
    (
        r"ReBA-1",
        "backward attention without repetition: each token looks back from all that follows it, "
        "weighted by the model's own attention",
    ),
    (
        r"ReBA-(\d+)",
        "the text stands {} times, and each token of the first copy looks back from all that follows it, "
        "weighted by the model's own attention",
    ),
    (r"RT-(\d+)", "the last token after {} passes, each with a memory of the one before (refined thought)"),
    (r"Token prepending", "slots before the text take, from layer to layer, the state of the last token behind them"),
    (
        r"Value aggregation",
        "what attention hands on at the end of a prompt for one word, averaged over the layers",
    ),
    (
        r"Contrastive prompting",
        "the end of a prompt that asks for one word, less what a second prompt finds irrelevant, from one layer on",
    ),
    (r"Bidirectional", "one pass whose last layer attends both ways"),
    (r"PromptEOL", "the last token of a prompt that asks what the text means in one word"),
    (
        r"Pretended CoT",
        "the last token, after the last layer but one, of a prompt that asks the same after thinking step by step",
    ),
    (
        r"Knowledge",
        "the last token, after the last layer but one, of a prompt that says what matters in a text and asks the same",
    ),
    (
        r"Early and late",
        "the mean of the text's tokens after an eighth of the layers, and beside it the last token of the prompt that "
        "stands around them and asks for one word",
    ),
    (r"CK", "the mean of what Pretended CoT and Knowledge give"),
    (r"MetaEOL", "the mean over the last tokens of eight prompts, each for another task"),
    (
        r"KV re-routing",
        "in the middle layers every token sees the last one's key and value; the last token, or (mean) its average "
        "with the mean of all",
    ),
    (r"tf-idf", "the tf-idf of the text's tokens, with no model at all: a token counts by how few texts have it"),
    (r"Bag of input embeddings", "the input embeddings alone, without any layer: no context at all"),
    (r"Random weights", "the same architecture and tokenizer with weights that were never trained"),
)
_MODIFIERS = {
    "filtered": "without the directions that frequent tokens are written in, which the language model's head shows",
    "centred": "less the mean of a sample of plain texts",
    "standardised": "each dimension with mean 0 and standard deviation 1 over a sample of plain texts",
    "whitened": "the principal directions of a sample of plain texts, scaled to nearly one variance",
    "partwise whitened": "each part standardised, a little whitened over a sample of plain texts, and given its share",
    "all but the top": "less the mean of a sample of plain texts and the directions in which they vary most",
    "early layer": "read after a third of the layers, where the model stops",
    "idf-weighted": "each token counts by how few of a sample of plain texts have it",
    "blocks": "each block of the text has two slots of its own, and every token is read",
    "bidirectional": "the last layer attends both ways",
    "Chinese": "in Chinese words",
    "prompt": "read at the end of a prompt that asks for one representative word",
}


def describe(recipe: str) -> str:
    """One sentence on a recipe.

    Args:
        recipe: Such as ``"ReBA-2, bidirectional"``.

    Returns:
        The sentence; empty for a name that is not one of the package's recipes.
    """
    head, *rest = recipe.split(", ")
    says = [_head(head)]
    if head == "Random weights" and rest:
        # What follows is a recipe of its own, read from those weights.
        says.append(_head(rest.pop(0)))
    says += [_MODIFIERS.get(part, "") for part in rest]
    if not all(says):
        return ""
    sentence = "; ".join(says)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _head(name: str) -> str:
    for pattern, says in _RECIPES:
        if match := re.fullmatch(pattern, name):
            return says.format(*match.groups())
    return ""
