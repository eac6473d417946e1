"""What stands around a text, to ask a model for one word; and what was tried in its place: the words of the results."""

from __future__ import annotations

from dataclasses import dataclass

import records

PROMPT_EOL = "PromptEOL"
#: PromptEOL's own ending, by language. An ending begins with the mark that closes the quotation.
OF_PROMPT_EOL = {"en": '" means in one word:"', "zh": "”用一个词来概括就是：“"}
#: What stands before a text, by language, and what between two copies of it.
BEGINNINGS = {
    "en": "The essence of a sentence is often captured by its main subjects and actions, while descriptive terms "
    'provide additional but less central details. With this in mind , this sentence : "',
    "zh": "一句话的要义往往在于它的主语和动作，修饰性的词语只补充次要的细节。考虑到这一点，这句话：“",
}
BETWEEN = {"en": '" can be rewritten as : "', "zh": "”可以改写为：“"}
#: The words of Echo topic up to the ending.
USUAL = {language: f"{BEGINNINGS[language]}{{text}}{BETWEEN[language]}{{text}}" for language in BEGINNINGS}
#: The same without words before the text.
WITHOUT = {language: f"{mark}{{text}}{BETWEEN[language]}{{text}}" for language, mark in (("en", '"'), ("zh", "“"))}
#: The layout of Echo topic with PromptEOL's ending.
MEANS = {language: f"{before}{OF_PROMPT_EOL[language]}" for language, before in USUAL.items()}
#: What was chosen, for two copies of a text, by the mean over models and development tasks.
CHOSEN = {"en": '" and its topic in one word is:"', "zh": "”，它的领域是：“"}


@dataclass(frozen=True)
class Ending:
    """What follows the text.

    Attributes:
        words: As they stand in the prompt.
        origin: ``"PromptEOL"``, ``"combined"``, or the name of the model that wrote it.
    """

    words: str
    origin: str = "combined"


def endings(language: str) -> list[Ending]:
    """Every ending of a language in ``wordings.csv``: nouns in frames, and what models wrote when asked to go on."""
    tried = records.read("wordings").filter(language=language).select("ending", "origin").unique(maintain_order=True)
    return [Ending(*row) for row in tried.rows()]


def layouts(language: str) -> list[str]:
    """Every beginning and joint of two copies of ``{text}`` in ``beginnings.csv``."""
    return list(records.read("beginnings").filter(language=language)["layout"].unique(maintain_order=True))
