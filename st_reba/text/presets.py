"""Templates by name, with the settings of their authors; changes of texts that they expect."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

# Marks that end a sentence as the prompts expect it, and replacements of the quotation marks that templates use.
_ENDS = ".?\"'。？”’"
_QUOTES = str.maketrans('"“”', "'‘’")
_QUESTIONS = {"?": ".", "？": "。"}

#: Languages that prompts are written in.
PromptLanguage = Literal["en", "zh"]
# Number of texts, and of characters of each, by which their language is decided.
_SAMPLE = 256

#: Tokens of a layout that are returned: see :class:`st_reba.modules.CausalModule`.
PoolOver = Literal["text", "all", "whole"]
#: All of these, or the last alone.
Rows = Literal["all", "last"]


@dataclass(frozen=True)
class Contrast:
    """Strength of contrastive prompting.

    Attributes:
        layer: Layer, counted from 1, of the 32 of its authors' models.
        scale: Factor of the difference of the two prompts.
    """

    layer: int
    scale: float

    def index(self, depth: int) -> int:
        """Return the layer, counted from 0, of a model with ``depth`` layers: the same share of them."""
        return max(1, round(self.layer * depth / 32)) - 1


@dataclass(frozen=True)
class Preset:
    """Template with the settings of its authors.

    Settings are defaults of a module's arguments of the same names. None: the authors name none.

    Attributes:
        template: Text of the template.
        pool_over: See :class:`st_reba.modules.CausalModule`.
        rows: See there.
        normalize_text: See there.
        output_layer: See there; or a share of the layers.
        final_norm: See there.
        contrast: Strength of :class:`st_reba.modules.ContrastivePromptingModule`.
        prompts: Prompts for a ``"query"`` and for a ``"document"``.
    """

    template: str
    pool_over: PoolOver | None = None
    rows: Rows | None = None
    normalize_text: bool | None = None
    output_layer: float | None = None
    final_norm: bool | None = None
    contrast: Contrast | None = None
    prompts: tuple[tuple[str, str], ...] = ()


def _prompt_eol(template: str, contrast: Contrast | None = None) -> Preset:
    """Return a preset of the PromptEOL family: the last token's state is the embedding."""
    return Preset(template, pool_over="all", rows="last", normalize_text=True, contrast=contrast)


def _without_last_layer(template: str) -> Preset:
    """Return one of Zhang et al., who read ``hidden_states[-2]``: after all layers but one, without the norm."""
    return replace(_prompt_eol(template, Contrast(layer=7, scale=3.0)), output_layer=-2, final_norm=False)


def _last_token(template: str, **prompts: str) -> Preset:
    """Return one of Yamada and Zhang, or of Zhuang et al.: the last token's state, of the unchanged text."""
    return Preset(template, pool_over="all", rows="last", prompts=tuple(prompts.items()))


# Beginning of the second prompt of Zhang et al.
_KNOWLEDGE = (
    "The essence of a sentence is often captured by its main subjects and actions, while descriptive terms provide "
    "additional but less central details. With this in mind"
)
_KNOWLEDGE_ZH = "一句话的要义往往在于它的主语和动作，修饰性的词语只补充次要的细节。考虑到这一点"

#: Strength for PromptEOL, and for any template that names none.
DEFAULT_CONTRAST = Contrast(layer=5, scale=2.0)

#: By name, for ``template=``.
#:
#: - ``springer``: the zero-shot prompt of Springer et al., "Repetition Improves Language Model Embeddings" (ICLR 2025).
#: - ``representative-word`` (as released and as in the paper) and ``csts``: BeLLM's (NAACL 2024). ``csts`` is for
#:   conditional similarity, with ``"Given the context ..., "`` as the ``prompt``.
#: - ``prompteol``: Jiang et al., "Scaling Sentence Embeddings with Large Language Models" (arXiv 2307.16645).
#: - ``pretended-cot``, ``knowledge``, ``promptsth``, ``promptsum``: Zhang et al., "Simple Techniques for Enhancing
#:   Sentence Embeddings in Generative Language Models" (2024), as released, with blanks before the commas. The first
#:   two, which they use without training, end after the last layer but one, without the final norm.
#: - ``promptreps``: Zhuang et al., "PromptReps: Prompting Large Language Models to Generate Dense and Sparse
#:   Representations for Zero-Shot Document Retrieval" (EMNLP 2024), with "it" in place of "the passage" and "the
#:   query": the prompts of ``encode_query`` and ``encode_document`` name the one or the other.
#: - ``ponte``: Yamada and Zhang, "Out-of-the-Box Conditional Text Embeddings from Large Language Models"
#:   (arXiv 2504.16411): the text in terms of the ``prompt``. ``ponte-aspect-first`` is ours: the prompt is read once
#:   for many texts.
#: - ``compress`` and ``compress-query``: Tang and Yang, "KV-Embedding" (arXiv 2601.01046).
#: - ``topic`` and ``echo-topic``: ours, which begin as ``knowledge`` does and ask for the topic; ``echo-topic`` repeats
#:   the text.
#: - ``...-zh``: our Chinese counterparts, with the same settings.
#:
#: The strengths of contrastive prompting are those of its paper (Cheng et al., ACL 2025).
PRESETS = {
    "springer": Preset("Rewrite the sentence: {text}, rewritten sentence: {text}"),
    "representative-word": Preset('The representative word for sentence {text} is:"', pool_over="all"),
    "representative-word-paper": Preset('The representative word for {text} is:"', pool_over="all"),
    "csts": Preset('summarize the sentence {text} in one word:"', pool_over="all"),
    "prompteol": _prompt_eol('This sentence : "{text}" means in one word:"', DEFAULT_CONTRAST),
    "pretended-cot": _without_last_layer('After thinking step by step , this sentence : "{text}" means in one word:"'),
    "knowledge": _without_last_layer(_KNOWLEDGE + ' , this sentence : "{text}" means in one word:"'),
    "promptsth": _prompt_eol('This sentence : "{text}" means something'),
    "promptsum": _prompt_eol('This sentence : "{text}" can be summarized as'),
    "prompteol-zh": _prompt_eol("这句话：“{text}”用一个词来概括就是：“", DEFAULT_CONTRAST),
    "pretended-cot-zh": _without_last_layer("经过一步一步的思考，这句话：“{text}”用一个词来概括就是：“"),
    "knowledge-zh": _without_last_layer(_KNOWLEDGE_ZH + "，这句话：“{text}”用一个词来概括就是：“"),
    "promptsth-zh": _prompt_eol("这句话：“{text}”表达了某种意思"),
    "promptsum-zh": _prompt_eol("这句话：“{text}”可以概括为"),
    "promptreps": _last_token(
        '"{text}". Use one most important word to represent it in a retrieval task. Make sure your word is in '
        'lowercase. The word is: "',
        query="Query: ",
        document="Passage: ",
    ),
    "promptreps-zh": _last_token(
        "“{text}”。用一个最重要的词来代表它，用于检索。这个词是：“", query="问题：", document="段落："
    ),
    "ponte": _last_token('Express this text "{text}" in one word in terms of {prompt}: "'),
    "ponte-aspect-first": _last_token('In terms of {prompt}, express this text "{text}" in one word: "'),
    "ponte-zh": _last_token("这段文字：“{text}”，就{prompt}而言，用一个词来概括就是：“"),
    "ponte-aspect-first-zh": _last_token("就{prompt}而言，这段文字：“{text}”用一个词来概括就是：“"),
    "topic": _prompt_eol(_KNOWLEDGE + ' , this sentence : "{text}" and its topic in one word is:"'),
    "echo-topic": Preset(
        _KNOWLEDGE + ' , this sentence : "{text}" can be rewritten as : "{text}" and its topic in one word is:"',
        normalize_text=True,
    ),
    "topic-zh": _prompt_eol(_KNOWLEDGE_ZH + "，这句话：“{text}”，它的领域是：“"),
    "echo-topic-zh": Preset(
        _KNOWLEDGE_ZH + "，这句话：“{text}”可以改写为：“{text}”，它的领域是：“", normalize_text=True
    ),
    "compress": Preset("Context: {text} Compress the Context in one word:", pool_over="all"),
    "compress-query": Preset("Query: {text} Compress the Query in one word:", pool_over="all"),
    "compress-zh": Preset("上下文：{text} 用一个词来压缩上下文：", pool_over="all"),
    "compress-query-zh": Preset("问题：{text} 用一个词来压缩问题：", pool_over="all"),
}

#: Texts of all presets, by name.
TEMPLATES = {name: preset.template for name, preset in PRESETS.items()}

#: PromptEOL's question with a slot before the text, with the settings of the authors of token prepending.
PREPENDED_ONE_WORD = _prompt_eol('This sentence : {prepend} "{text}" means in one word:"')

#: The eight prompts of Lei et al. (ACL 2024), as released: two for each of four meta-tasks, text classification,
#: sentiment analysis, paraphrase identification and information extraction.
META_TASKS = (
    "In this task, you're presented with a text excerpt. Your task is to categorize the excerpt into a broad category "
    "such as 'Education', 'Technology', 'Health', 'Business', 'Environment', 'Politics', or 'Culture'. These "
    "categories help in organizing content for better accessibility and targeting. For this task, this sentence : "
    '"{text}" should be classified under one general category in one word:"',
    "In this task, you're given a statement and you need to determine whether it's presenting an 'Opinion' or a "
    "'Fact'. This distinction is vital for information verification, educational purposes, and content analysis. For "
    'this task, this sentence : "{text}" discriminates between opinion and fact in one word:"',
    "In this task, you're given a review from an online platform. Your task is to generate a rating for the product "
    "based on the review on a scale of 1-5, where 1 means 'extremely negative' and 5 means 'extremely positive'. For "
    'this task, this sentence : "{text}" reflects the sentiment in one word:"',
    "In this task, you're reading a personal diary entry. Your task is to identify the predominant emotion expressed, "
    'such as joy, sadness, anger, fear, or love. For this task, this sentence : "{text}" conveys the emotion in one '
    'word:"',
    "In this task, you're presented with two sentences. Your task is to assess whether the sentences convey the same "
    "meaning. Use 'identical', 'similar', 'different', or 'unrelated' to describe the relationship. To enhance the "
    'performance of this task, this sentence : "{text}" means in one word:"',
    "In this task, you're given a sentence and a phrase. Your task is to determine if the phrase can be a contextual "
    "synonym within the given sentence. Options include 'yes', 'no', or 'partially'. To enhance the performance of "
    'this task, this sentence : "{text}" means in one word:"',
    "In this task, you're examining a news article. Your task is to extract the most critical fact from the article. "
    'For this task, this sentence : "{text}" encapsulates the key fact in one word:"',
    "In this task, you're reviewing a scientific abstract. Your task is to identify the main entities (e.g., proteins, "
    'diseases) and their relations (e.g., causes, treats). For this task, this sentence : "{text}" highlights the '
    'primary entity or relation in one word:"',
)

#: Prompts whose mean is the embedding, by name.
#:
#: - ``meta-tasks``: :data:`META_TASKS`.
#: - ``ck``: Pretended CoT and Knowledge (Zhang et al.), whose mean the authors of contrastive prompting call CK;
#:   ``ck-zh``: their Chinese counterparts.
PRESET_SETS = {
    "meta-tasks": tuple(map(_prompt_eol, META_TASKS)),
    "ck": (PRESETS["pretended-cot"], PRESETS["knowledge"]),
    "ck-zh": (PRESETS["pretended-cot-zh"], PRESETS["knowledge-zh"]),
}


def preset(template: str) -> Preset:
    """Return the preset of a name, or one without settings for a text.

    The text of a preset brings no settings: a saved configuration has the text, with settings of its own.
    """
    # Template.parse refuses what is no text.
    return PRESETS.get(str(template), Preset(template))


def agreed(presets: Sequence[Preset]) -> Preset:
    """Return the settings on which all presets agree, with the template of the first."""
    first, *others = presets
    alike = {name: value for name, value in vars(first).items() if all(vars(other)[name] == value for other in others)}
    return Preset(**{**alike, "template": first.template})


def normalized(text: str) -> str:
    """Return a text as the prompts of the PromptEOL family expect it, as their released code does.

    A text whose last character is none of ``. ? ' "`` gets a final ``.``; every ``"`` becomes ``'``; a final ``?`` then
    becomes ``.``. Chinese marks count like these, and a text that ends in an ideograph or a full-width mark gets the
    Chinese full stop. A blank text stays as it is. Every character keeps its place.
    """
    if not text.strip():
        return text
    if text[-1] not in _ENDS:
        text += "。" if _is_chinese(text[-1]) else "."
    text = text.translate(_QUOTES)
    return text[:-1] + _QUESTIONS.get(text[-1], text[-1])


def _is_chinese(character: str) -> bool:
    """Return whether a character is an ideograph or a full-width mark."""
    if unicodedata.category(character)[0] == "P":
        return unicodedata.east_asian_width(character) in "WF"
    return unicodedata.name(character, "").startswith("CJK ")


def language_of(texts: Sequence[str]) -> PromptLanguage:
    """Return the language of prompts for texts: ``"zh"`` if most letters are Chinese characters, else ``"en"``.

    It is ``"en"`` for Japanese texts too, most of whose letters are kana.
    """
    sample = texts[:: max(1, len(texts) // _SAMPLE)]
    letters = [letter for text in sample for letter in text[:_SAMPLE] if letter.isalpha()]
    chinese = sum(unicodedata.name(letter, "").startswith("CJK UNIFIED") for letter in letters)
    return "zh" if chinese > len(letters) / 2 else "en"


def in_context(sentence: str, condition: str) -> dict[str, str]:
    """Return a sentence behind a condition, in BeLLM's words, as an input for the template ``csts``.

    Inputs of one batch may have different conditions: ``model.encode([in_context(sentence, condition), ...])``.

    Returns:
        ``{"prompt": "Given the context ..., ", "text": sentence}``.
    """
    return {"prompt": f"Given the context {condition}, ", "text": sentence}


def in_terms_of(text: str, aspect: str) -> dict[str, str]:
    """Return a text and its aspect as an input for a template with ``{prompt}``, such as ``ponte``.

    Inputs of one batch may have different aspects. For one aspect, use ``model.encode(texts, prompt=aspect)``.

    Returns:
        ``{"prompt": aspect, "text": text}``.
    """
    return {"prompt": aspect, "text": text}
