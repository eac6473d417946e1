"""Table of all recipes.

A new recipe is a row here, with a module if it needs one, a page of the documentation, and a test of its definition.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .. import modules
from ..text.presets import PRESETS
from .recipe import PostProcessor, Row

# The table is formatted by hand: key, name and class, then the description, then the rest.
# fmt: off

#: Filter of recipes whose vectors consist of parts, and of their controls.
PARTWISE = "partwise whitened"
#: Filter of recipes whose parts are added, and of their controls.
SUM = "standardised sum"
#: Weights of tokens before a pooling.
IDF = "idf-weighted"

#: All filters and weights by name.
POST_PROCESSORS = {
    part.name: part
    for part in (
        PostProcessor("filtered",
            "without the directions that frequent tokens are written in, as the model's head shows them",
            modules.EmbeddingFilter),
        PostProcessor("centred", "less the mean of a sample of plain texts", modules.Centering),
        PostProcessor("standardised",
            "each dimension with mean 0 and standard deviation 1 over a sample of plain texts",
            modules.Standardization),
        PostProcessor("whitened",
            "the principal directions of a sample of plain texts, scaled to nearly one variance",
            modules.WhiteningTransform),
        PostProcessor("all but the top",
            "less the mean of a sample of plain texts and the directions in which they vary most",
            modules.AllButTheTop),
        PostProcessor(PARTWISE,
            "each part standardised, a little whitened over a sample of plain texts, and given its share",
            modules.PartwiseWhitening),
        PostProcessor(SUM,
            "each part standardised over a sample of plain texts and scaled to one length, and their sum taken",
            modules.StandardizedSum, enough=200),
        PostProcessor(IDF,
            "each token counts by how few of a sample of plain texts have it",
            modules.IdfWeights, ("mean",)),
    )
}

#: Filters that fit any recipe.
FILTERS = tuple(name for name in POST_PROCESSORS if name not in (PARTWISE, SUM, IDF))

_ZHANG = (
    "Bowen Zhang, Kehua Chang, Chunping Li: Simple Techniques for Enhancing Sentence Embeddings in Generative Language "
    "Models. ICIC 2024."
)
_BELLM = modules.BidirectionalLastLayer.citation
#: Settings for a template of the user's own, as for the prompts of PromptEOL.
_AS_A_PROMPT = {name: getattr(PRESETS["prompteol"], name) for name in ("pool_over", "rows", "normalize_text")}
_LOOKS_BACK = "looks back from all that follows it, weighted by the model's own attention"
_AT_ITS_END: dict[str, Any] = {"poolings": ("last",), "own_template": _AS_A_PROMPT, "page": "prompts"}

_PROMPTEOL = Row("prompteol", "PromptEOL", modules.CausalTransformer,
    "the last token of a prompt that asks what the text means in one word",
    settings={"template": "prompteol"}, chinese={"template": "prompteol-zh"}, tried=("last",),
    paper="Ting Jiang et al.: Scaling Sentence Embeddings with Large Language Models. arXiv:2307.16645, 2023.",
    **_AT_ITS_END)


def repeated(copies: int) -> list[Row]:
    """Return the rows that read ``copies`` copies of a text, two or more."""
    return [
        Row(f"echo-{copies}", f"Echo-{copies}", modules.EchoModule,
            f"the text occurs {copies} times, and its last copy is read",
            page="echo", cost=f"about {copies}", settings={"repetitions": copies},
            tried=("mean",) if copies == 2 else (), copies=copies, words=True),
        Row(f"reba-{copies}", f"ReBA-{copies}", modules.ReBAModule,
            f"the text occurs {copies} times, and each token of the first copy {_LOOKS_BACK}",
            page="reba", cost=f"about {copies}", settings={"repetitions": copies}, settings_if_last={"rows": "last"},
            tried=("mean", "last") if copies == 2 else (), copies=copies, words=True),
    ]


#: The embedding without a recipe.
CLASSICAL = Row("classical", "Classical", modules.CausalTransformer,
    "the last hidden states of one ordinary causal pass",
    page="echo", tried=("mean", "last"), copies=1, words=True)

#: Rows that read a text once and are shown first.
FIRST = (
    CLASSICAL,
    Row("reba-1", "ReBA-1", modules.ReBAModule,
        f"backward attention without repetition: each token {_LOOKS_BACK}",
        page="reba", settings={"repetitions": 1}, settings_if_last={"rows": "last"}, copies=1,
        poolings=("mean",), words=True),
)

#: All other rows.
OTHERS = (
    Row("bidirectional", "Bidirectional", modules.CausalTransformer,
        "one pass whose last layer attends both ways",
        page="bidirectional", settings={"bidirectional_layers": 1}, poolings=("mean",), words=True, paper=_BELLM),
    Row("echo-2-bidirectional", "Echo-2, bidirectional", modules.EchoModule,
        "the text occurs 2 times, and its last copy is read; the last layer attends both ways",
        page="bidirectional", cost="about 2", settings={"repetitions": 2, "bidirectional_layers": 1},
        poolings=("mean",), words=True, paper=f"{modules.EchoModule.citation} {_BELLM}"),
    Row("reba-2-bidirectional", "ReBA-2, bidirectional", modules.ReBAModule,
        f"the text occurs 2 times, and each token of the first copy {_LOOKS_BACK}; the last layer attends both ways",
        page="bidirectional", cost="about 2", settings={"repetitions": 2, "bidirectional_layers": 1},
        settings_if_last={"rows": "last"}, words=True, paper=f"{modules.ReBAModule.citation} {_BELLM}"),
    Row("bidirectional-prompt", "Bidirectional, prompt", modules.BidirectionalLastLayer,
        "one pass whose last layer attends both ways; read at the end of a prompt that asks for one representative "
        "word",
        page="bidirectional", poolings=("last",)),
    *(
        Row(f"rt-{passes}", f"RT-{passes}", modules.RefinedThoughtModule,
            f"the last token after {passes} passes, each with a memory of the one before (refined thought)",
            page="refined-thought", cost="little more than 1", settings={"iterations": passes}, poolings=("last",))
        for passes in (2, 4, 8)
    ),
    _PROMPTEOL,
    replace(_PROMPTEOL.in_chinese(), compared="all"),
    Row("pretended-cot", "Pretended CoT", modules.CausalTransformer,
        "the last token, after the last layer but one, of a prompt that asks the same after thinking step by step",
        settings={"template": "pretended-cot"}, chinese={"template": "pretended-cot-zh"}, paper=_ZHANG,
        **_AT_ITS_END),
    Row("knowledge", "Knowledge", modules.CausalTransformer,
        "the last token, after the last layer but one, of a prompt that says what matters in a text and asks the same",
        settings={"template": "knowledge"}, chinese={"template": "knowledge-zh"}, paper=_ZHANG,
        **_AT_ITS_END),
    Row("promptreps", "PromptReps", modules.CausalTransformer,
        "the last token of a prompt that asks for the one word by which to find the text",
        settings={"template": "promptreps"}, chinese={"template": "promptreps-zh"},
        paper=modules.PromptRepsModule.citation, poolings=("last",), page="prompts"),
    Row("metaeol", "MetaEOL", modules.MetaEOLModule,
        "the mean over the last tokens of eight prompts, each for another task",
        page="prompts", cost="8 prompts", poolings=("mean",)),
    Row("ck", "CK", modules.MetaEOLModule,
        "the mean of what Pretended CoT and Knowledge give",
        page="prompts", cost="2 prompts", settings={"templates": "ck"}, chinese={"templates": "ck-zh"},
        poolings=("mean",), paper=_ZHANG),
    Row("reverse-eol", "ReverseEOL", modules.ReverseEOLModule,
        "the last token of a prompt that asks what the text means in one word, and of the same prompt around the text "
        "in reverse order",
        page="prompts", cost="2 prompts", settings={"average": False}, chinese={"template": "prompteol-zh"},
        poolings=("last",), post_processor=POST_PROCESSORS[SUM], own_template=_AS_A_PROMPT, parts=2),
    Row("kv-rerouting", "KV re-routing", modules.KVReroutingModule,
        "in the middle layers every token sees the last one's key and value; the last token, or (mean) its average "
        "with the mean of all",
        page="echo", chinese={"template": "compress-zh"}),
    Row("no-sink", "Both ways, no sink", modules.NoSinkModule,
        "one pass whose upper half of layers attends both ways, and in whose last quarter no other token attends to "
        "the first one",
        page="bidirectional", poolings=("mean",), words=True),
    Row("attention-pooling", "Attention pooling", modules.AttentionPoolingModule,
        "a mean of the last hidden states, weighted by the last token's attention, averaged over heads",
        page="echo", poolings=("last",)),
    Row("token-prepending", "Token prepending", modules.TokenPrependingModule,
        "slots before the text take, from layer to layer, the state of the last token behind them",
        page="echo", cost="less than 1", poolings=("last",), own_template=_AS_A_PROMPT),
    Row("value-aggregation", "Value aggregation", modules.ValueAggregationModule,
        "the output of attention at the end of a prompt for one word, averaged over the layers",
        page="prompts", cost="less than 1", poolings=("last",), tried=("last",),
        chinese={"template": "prompteol-zh"}, own_template=_AS_A_PROMPT),
    Row("contrastive-prompting", "Contrastive prompting", modules.ContrastivePromptingModule,
        "the end of a prompt that asks for one word, less what a second prompt finds irrelevant, from one layer on",
        page="prompts", cost="little more than 1", poolings=("last",), own_template=_AS_A_PROMPT),
    Row("early-late", "Early and late", modules.EarlyLateModule,
        "the mean of the text's tokens after an eighth of the layers, followed by the last token of the prompt around "
        "them, which asks for one word",
        page="topic", poolings=("mean",), tried=("mean",), post_processor=POST_PROCESSORS[PARTWISE],
        chinese={"template": "prompteol-zh"}, own_template={"normalize_text": True}, parts=2),
    Row("topic", "Topic", modules.TopicModule,
        "the last token of a prompt that asks for the text's topic in one word, after the last layer and a few layers "
        "below",
        page="topic", settings={"template": "topic"}, chinese={"template": "topic-zh"}, poolings=("last",),
        post_processor=POST_PROCESSORS[SUM], own_template={"normalize_text": True}, reworded=True, parts=2,
        tried=("last",)),
    Row("echo-topic", "Echo topic", modules.TopicModule,
        "the mean over the second copy of the text in a prompt that asks for its topic in one word, followed by "
        "the last token after the last layer and a few layers below",
        page="topic", cost="about 2", settings={"template": "echo-topic"}, chinese={"template": "echo-topic-zh"},
        poolings=("mean",), tried=("mean",), post_processor=POST_PROCESSORS[SUM], own_template={"normalize_text": True},
        reworded=True, parts=3),
    Row("echo-springer", "Echo, Springer's prompt", modules.EchoModule,
        "a prompt asks to rewrite the text, and its second copy is read",
        page="echo", cost="about 2", settings={"template": "springer"}, compared="never", words=True),
    *(
        Row(f"reba-{copies}-normalised", f"ReBA-{copies}, normalised", modules.ReBAModule,
            f"as ReBA-{copies}, the weights of each token divided by their sum",
            page="reba", cost=f"about {copies}" if copies > 1 else "1",
            settings={"repetitions": copies, "normalize_weights": True}, settings_if_last={"rows": "last"},
            compared="never", words=True)
        for copies in (1, 2)
    ),
)

#: The control without context.
BAG = Row("bag-of-input-embeddings", "Bag of input embeddings", modules.InputEmbeddings,
    "the input embeddings alone, without any layer: no context at all",
    page="controls", cost="0", poolings=("mean",), compared="never", words=True)
