"""What stands around and between the copies of a text: templates, and how their authors read those that have a name.

Nothing here knows a tokenizer or a model.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

SLOT = "{text}"

#: What token prepending writes where a vector of its own enters.
PREPEND = "{prepend}"

#: Where a template has the prompt, which else stands at the front: what the text is read in terms of.
PROMPT = "{prompt}"

#: Characters of all templates of a module together, far above what helps: a configuration that asks for more is a
#: mistake or an attack.
MAX_TEMPLATE_LENGTH = 2**16

# A final mark that closes a sentence as the prompts expect it, and what stands in for the quotation marks that are the
# template's own.
_ENDS = ".?\"'。？”’"
_QUOTES = str.maketrans('"“”', "'‘’")
_QUESTIONS = {"?": ".", "？": "。"}

#: Languages that prompts are written in.
PromptLanguage = Literal["en", "zh"]
# So many texts, evenly drawn, and so many characters of each tell which language they are in.
_LOOKED_AT = 256

#: Which tokens of a layout are handed on: see :class:`st_reba.modules.CausalModule`.
PoolOver = Literal["text", "all", "whole"]
#: Whether all of these, or the last alone.
Rows = Literal["all", "last"]


@dataclass(frozen=True)
class Contrast:
    """How contrastive prompting steers a prompt.

    Attributes:
        layer: In which layer, counted from 1, of the 32 that its authors' models have.
        scale: By how much the difference of the two prompts is multiplied.
    """

    layer: int
    scale: float

    def index(self, depth: int) -> int:
        """The layer, counted from 0, in a model of so many: the same share of the way up, and the first at least."""
        return max(1, round(self.layer * depth / 32)) - 1


@dataclass(frozen=True)
class Preset:
    """A template and how its authors read it.

    Each attribute but the first is a module's argument of that name where the caller does not give it. None: the
    authors say nothing of it, and the module does what it does with any template.

    Attributes:
        template: Its text.
        pool_over: Which tokens are handed on.
        rows: All of them, or the last alone.
        normalize_text: Whether texts are changed as the prompts of the PromptEOL family expect it.
        output_layer: After which layer, as for :class:`st_reba.modules.CausalModule`; or a share of the layers.
        final_norm: Whether through the model's final norm.
        contrast: How :class:`st_reba.modules.ContrastivePromptingModule` steers it.
        prompts: What its authors put before a ``"query"`` and before a ``"document"``.
    """

    template: str
    pool_over: PoolOver | None = None
    rows: Rows | None = None
    normalize_text: bool | None = None
    output_layer: float | None = None
    final_norm: bool | None = None
    contrast: Contrast | None = None
    prompts: tuple[tuple[str, str], ...] = ()

    def settings(self) -> dict[str, Any]:
        """How it is read, as arguments of a module; without those of which nothing is said."""
        found = {name: getattr(self, name) for name in READING}
        return {name: value for name, value in found.items() if value is not None}


#: The arguments of a module that a preset has a word in.
READING = tuple(field.name for field in fields(Preset) if field.name not in ("template", "contrast", "prompts"))


def _read_at_its_end(template: str, contrast: Contrast | None = None) -> Preset:
    """Of the PromptEOL family: the last token's state is the embedding."""
    return Preset(template, pool_over="all", rows="last", normalize_text=True, contrast=contrast)


def _last_but_one(template: str) -> Preset:
    """By Zhang et al., who read ``hidden_states[-2]`` of transformers' output: after all layers but one, unnormed."""
    return replace(_read_at_its_end(template, Contrast(layer=7, scale=3.0)), output_layer=-2, final_norm=False)


def _read_to_the_end(template: str) -> Preset:
    """By Yamada and Zhang: the last token's state is the embedding, of the text as it is."""
    return Preset(template, pool_over="all", rows="last")


def _one_word_to_find(template: str, query: str, document: str) -> Preset:
    """By Zhuang et al., whose word is looked for among those of other texts."""
    return Preset(template, pool_over="all", rows="last", prompts=(("query", query), ("document", document)))


# How Zhang et al. begin their second prompt.
_KNOWLEDGE = (
    "The essence of a sentence is often captured by its main subjects and actions, while descriptive terms provide "
    "additional but less central details. With this in mind"
)
_KNOWLEDGE_ZH = "一句话的要义往往在于它的主语和动作，修饰性的词语只补充次要的细节。考虑到这一点"

#: Of PromptEOL; and of any template of which nothing else is said.
USUAL_CONTRAST = Contrast(layer=5, scale=2.0)

#: By name, for ``template=``.
#:
#: - ``springer``: the zero-shot prompt of Springer et al., "Repetition Improves Language Model Embeddings" (ICLR 2025).
#: - ``representative-word`` (as released and as in the paper) and ``csts``: BeLLM's (NAACL 2024). ``csts`` is for
#:   conditional similarity, where ``"Given the context ..., "`` goes before it as the ``prompt``.
#: - ``prompteol``: Jiang et al., "Scaling Sentence Embeddings with Large Language Models" (arXiv 2307.16645).
#: - ``pretended-cot``, ``knowledge``, ``promptsth``, ``promptsum``: Zhang et al., "Simple Techniques for Enhancing
#:   Sentence Embeddings in Generative Language Models" (2024), as released, blanks before the commas included. The
#:   first two, which they use without training, they read after the last layer but one, without the final norm.
#: - ``promptreps``: Zhuang et al., "PromptReps: Prompting Large Language Models to Generate Dense and Sparse
#:   Representations for Zero-Shot Document Retrieval" (EMNLP 2024), "it" in place of "the passage" and "the query":
#:   which of the two it is, says the prompt that ``encode_query`` and ``encode_document`` put before it.
#: - ``ponte``: Yamada and Zhang, "Out-of-the-Box Conditional Text Embeddings from Large Language Models"
#:   (arXiv 2504.16411): the text in terms of the ``prompt``. ``ponte-aspect-first`` is ours: the prompt is read once
#:   for many texts.
#: - ``compress`` and ``compress-query``: Tang and Yang, "KV-Embedding" (arXiv 2601.01046).
#: - ``topic`` and ``echo-topic``: ours, which begin as ``knowledge`` does and ask for the topic; ``echo-topic`` repeats
#:   the text.
#: - ``...-zh``: our Chinese counterparts, read like what they stand for.
#:
#: The strengths of contrastive prompting are those of its paper (Cheng et al., ACL 2025).
PRESETS = {
    "springer": Preset("Rewrite the sentence: {text}, rewritten sentence: {text}"),
    "representative-word": Preset('The representative word for sentence {text} is:"', pool_over="all"),
    "representative-word-paper": Preset('The representative word for {text} is:"', pool_over="all"),
    "csts": Preset('summarize the sentence {text} in one word:"', pool_over="all"),
    "prompteol": _read_at_its_end('This sentence : "{text}" means in one word:"', USUAL_CONTRAST),
    "pretended-cot": _last_but_one('After thinking step by step , this sentence : "{text}" means in one word:"'),
    "knowledge": _last_but_one(_KNOWLEDGE + ' , this sentence : "{text}" means in one word:"'),
    "promptsth": _read_at_its_end('This sentence : "{text}" means something'),
    "promptsum": _read_at_its_end('This sentence : "{text}" can be summarized as'),
    "prompteol-zh": _read_at_its_end("这句话：“{text}”用一个词来概括就是：“", USUAL_CONTRAST),
    "pretended-cot-zh": _last_but_one("经过一步一步的思考，这句话：“{text}”用一个词来概括就是：“"),
    "knowledge-zh": _last_but_one(_KNOWLEDGE_ZH + "，这句话：“{text}”用一个词来概括就是：“"),
    "promptsth-zh": _read_at_its_end("这句话：“{text}”表达了某种意思"),
    "promptsum-zh": _read_at_its_end("这句话：“{text}”可以概括为"),
    "promptreps": _one_word_to_find(
        '"{text}". Use one most important word to represent it in a retrieval task. Make sure your word is in '
        'lowercase. The word is: "',
        query="Query: ",
        document="Passage: ",
    ),
    "promptreps-zh": _one_word_to_find(
        "“{text}”。用一个最重要的词来代表它，用于检索。这个词是：“", query="问题：", document="段落："
    ),
    "ponte": _read_to_the_end('Express this text "{text}" in one word in terms of {prompt}: "'),
    "ponte-aspect-first": _read_to_the_end('In terms of {prompt}, express this text "{text}" in one word: "'),
    "ponte-zh": _read_to_the_end("这段文字：“{text}”，就{prompt}而言，用一个词来概括就是：“"),
    "ponte-aspect-first-zh": _read_to_the_end("就{prompt}而言，这段文字：“{text}”用一个词来概括就是：“"),
    "topic": _read_at_its_end(_KNOWLEDGE + ' , this sentence : "{text}" and its topic in one word is:"'),
    "echo-topic": Preset(
        _KNOWLEDGE + ' , this sentence : "{text}" can be rewritten as : "{text}" and its topic in one word is:"',
        normalize_text=True,
    ),
    "topic-zh": _read_at_its_end(_KNOWLEDGE_ZH + "，这句话：“{text}”，它的领域是：“"),
    "echo-topic-zh": Preset(
        _KNOWLEDGE_ZH + "，这句话：“{text}”可以改写为：“{text}”，它的领域是：“", normalize_text=True
    ),
    "compress": Preset("Context: {text} Compress the Context in one word:", pool_over="all"),
    "compress-query": Preset("Query: {text} Compress the Query in one word:", pool_over="all"),
    "compress-zh": Preset("上下文：{text} 用一个词来压缩上下文：", pool_over="all"),
    "compress-query-zh": Preset("问题：{text} 用一个词来压缩问题：", pool_over="all"),
}

#: The texts of all presets, by name.
TEMPLATES = {name: preset.template for name, preset in PRESETS.items()}

#: What may stand behind a text in place of the end of ``topic`` and ``echo-topic``, by what it asks for.
ENDINGS: dict[PromptLanguage, dict[str, str]] = {
    "en": {
        "meaning": '" and its meaning in one word is:"',
        "summary": '" and its summary in one word is:"',
        "domain": '" and its domain in one word is:"',
    },
    "zh": {
        "topic": "”，它的主题是：“",
        "meaning": "”，它的意思是：“",
        "summary": "”，用一个词概括就是：“",
    },
}

#: PromptEOL's question with a slot before the text, as the authors of token prepending ask and read it.
PREPENDED_ONE_WORD = _read_at_its_end('This sentence : {prepend} "{text}" means in one word:"')

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

#: Prompts that are read together, their mean being the embedding, by name.
#:
#: - ``meta-tasks``: :data:`META_TASKS`.
#: - ``ck``: Pretended CoT and Knowledge (Zhang et al.), whose mean the authors of contrastive prompting call CK;
#:   ``ck-zh``: their Chinese counterparts.
PRESET_SETS = {
    "meta-tasks": tuple(map(_read_at_its_end, META_TASKS)),
    "ck": (PRESETS["pretended-cot"], PRESETS["knowledge"]),
    "ck-zh": (PRESETS["pretended-cot-zh"], PRESETS["knowledge-zh"]),
}


def preset(template: str) -> Preset:
    """What is known of a template: all that a preset says, if this is the name of one; if it is a text, the text.

    A text that happens to be a preset's is a text: how it is read is the caller's to say. So a saved model, whose
    configuration has the text, is read as it was saved.
    """
    # What is no text is refused where it is parsed.
    return PRESETS.get(str(template), Preset(template))


def agreed(presets: Sequence[Preset]) -> Preset:
    """What all of these, at least one, say alike; its template is the first one's."""
    first = presets[0]
    alike = {name: getattr(first, name) for name in READING if len({getattr(each, name) for each in presets}) == 1}
    return Preset(first.template, **alike)


def normalized(text: str) -> str:
    """A text as the prompts of the PromptEOL family expect it, as their released code does.

    A text whose last character is none of ``. ? ' "`` gets a final ``.``; every ``"`` becomes ``'``; a final ``?`` then
    becomes ``.``. Chinese is treated alike: its full stop, question mark and quotation marks count as theirs do, and a
    text that ends in an ideograph or a full-width mark gets its full stop. A text of nothing but blanks stays as it is.

    Every replacement is one character for one, and what is added is at the end: a character keeps its place.
    """
    if not text.strip():
        return text
    if text[-1] not in _ENDS:
        text += "。" if _is_chinese(text[-1]) else "."
    text = text.translate(_QUOTES)
    return text[:-1] + _QUESTIONS.get(text[-1], text[-1])


def _is_chinese(character: str) -> bool:
    """Whether it is an ideograph or a full-width mark."""
    if unicodedata.category(character)[0] == "P":
        return unicodedata.east_asian_width(character) in "WF"
    return unicodedata.name(character, "").startswith("CJK ")


def language_of(texts: Sequence[str]) -> PromptLanguage:
    """The language in which to ask about texts, by their script: ``"zh"`` where most letters are Chinese characters.

    Japanese texts, most of whose letters are kana, are no Chinese ones: for these, as for all others, it is ``"en"``.
    """
    sample = texts[:: max(1, len(texts) // _LOOKED_AT)]
    letters = [letter for text in sample for letter in text[:_LOOKED_AT] if letter.isalpha()]
    chinese = sum(unicodedata.name(letter, "").startswith("CJK UNIFIED") for letter in letters)
    return "zh" if chinese > len(letters) / 2 else "en"


def in_context(sentence: str, condition: str) -> dict[str, str]:
    """A sentence and its condition as BeLLM words it for the template ``csts``: a prompt of the sentence's own.

    The modules of this package embed such inputs, in one batch and whatever their prompts:
    ``model.encode([in_context(sentence, condition), ...])``.

    Returns:
        ``{"prompt": "Given the context ..., ", "text": sentence}``.
    """
    return {"prompt": f"Given the context {condition}, ", "text": sentence}


def in_terms_of(text: str, aspect: str) -> dict[str, str]:
    """A text and what it is read in terms of, for a template with ``{prompt}`` such as ``ponte``.

    The modules of this package embed such inputs, in one batch and whatever their aspects. For one aspect of all
    texts, ``model.encode(texts, prompt=aspect)`` does the same.

    Returns:
        ``{"prompt": aspect, "text": text}``.
    """
    return {"prompt": aspect, "text": text}


@dataclass(frozen=True)
class Template:
    """What stands around and between the copies of a text.

    Attributes:
        literals: The literal parts around the slots: ``literals[i]`` stands before copy ``i``, the last one at the end.
        end: Whether each layout must end in the tokenizer's end-of-sequence token, added where it adds none itself.
    """

    literals: tuple[str, ...]
    end: bool = False

    @classmethod
    def parse(cls, template: str) -> Template:
        """Read a template string or the name of one in :data:`st_reba.TEMPLATES`.

        ``{text}`` is the only thing that is not literal, and one ``{prepend}`` before it, where the slot of token
        prepending stands, and one ``{prompt}``, where the prompt stands, which stay parts of their literals.
        ``str.format`` is never called, because a template may come from a configuration file that somebody else wrote.

        Args:
            template: The string or name.

        Raises:
            ValueError: If there is no ``{text}``, or any other brace, or ``{prepend}`` elsewhere, or two ``{prompt}``,
                or it is longer than :data:`MAX_TEMPLATE_LENGTH` characters.
        """
        if not isinstance(template, str):
            raise ValueError(f"template must be a string, but {template!r} was given.")
        check_template_length([template])
        literals = TEMPLATES.get(template, template).split(SLOT)
        allowed = f"A template is text with {SLOT} where the input goes, or one of {sorted(TEMPLATES)}."
        if len(literals) == 1:
            raise ValueError(f"The template {template!r} has no {SLOT}. {allowed}")
        if template.count(PREPEND) > literals[0].count(PREPEND) or literals[0].count(PREPEND) > 1:
            raise ValueError(
                f"The template {template!r} may have one {PREPEND}, and have it before {SLOT}: there the slot stands."
            )
        if template.count(PROMPT) > 1:
            raise ValueError(f"The template {template!r} has {PROMPT} {template.count(PROMPT)} times: give it once.")
        if any(brace in literal.replace(PREPEND, "").replace(PROMPT, "") for literal in literals for brace in "{}"):
            raise ValueError(
                f"The template {template!r} has braces other than {SLOT} and {PROMPT}. {allowed} Remove the others."
            )
        return cls(tuple(literals))

    @classmethod
    def repeat(cls, copies: int) -> Template:
        """``copies`` copies of the text and nothing else."""
        return cls(("",) * (copies + 1))

    @property
    def copies(self) -> int:
        """How often the text stands in the layout."""
        return len(self.literals) - 1

    @property
    def takes_prompt(self) -> bool:
        """Whether the prompt has a slot of its own, and does not stand at the front."""
        return any(PROMPT in literal for literal in self.literals)

    def check_prompt(self, prompt: str) -> None:
        """Refuse to read a text in terms of nothing.

        Raises:
            ValueError: If the prompt has a slot of its own, and is blank.
        """
        if self.takes_prompt and not prompt.strip():
            raise ValueError(
                f"The template {str(self)!r} reads a text in terms of a prompt, and no prompt was given: give one, "
                'such as encode(texts, prompt="its topic"), or give the model prompts and a default_prompt_name.'
            )

    def __str__(self) -> str:
        return SLOT.join(self.literals)


def around_slots(template: str, first: str, second: str) -> tuple[str, str, str]:
    """What stands before, between and behind the two slots of a template.

    Args:
        template: Text with both slots once, in this order, and no other braces.
        first: A slot, such as ``{query}``.
        second: The slot behind it.

    Raises:
        ValueError: If the template is not that, or longer than :data:`MAX_TEMPLATE_LENGTH` characters.
    """
    if not isinstance(template, str):
        raise ValueError(f"template must be a string, but {template!r} was given.")
    check_template_length([template])
    before, has_first, rest = template.partition(first)
    between, has_second, behind = rest.partition(second)
    if not (has_first and has_second) or any(brace in before + between + behind for brace in "{}"):
        raise ValueError(
            f"The template {template!r}: give text with one {first} and, behind it, one {second}; no other braces."
        )
    return before, between, behind


def check_template_length(templates: Sequence[str]) -> None:
    """Refuse templates that would take minutes to tokenise."""
    length = sum(map(len, templates))
    if length > MAX_TEMPLATE_LENGTH:
        raise ValueError(
            f"{length:,} characters of templates were given, and at most {MAX_TEMPLATE_LENGTH:,} are allowed: "
            "shorten what stands around the text."
        )
