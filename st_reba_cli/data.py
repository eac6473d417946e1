"""What ``compare``, ``search`` and ``layers`` measure on, texts to fit on, and in which language recipes ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from .checks import check_source
from .printing import notes

if TYPE_CHECKING:
    from st_reba.data.tables import Data
    from st_reba.recipes import Recipe

#: By the code of a language, its name.
LANGUAGES = {"en": "English", "zh": "Chinese"}


def prompts_of(query: str | None, document: str | None) -> dict[str, str]:
    """As sentence-transformers calls them: those of ``encode_query`` and ``encode_document``."""
    return {name: prompt for name, prompt in (("query", query), ("document", document)) if prompt}


@dataclass(frozen=True)
class Source:
    """What is measured on, as the options of these names say it.

    Raises:
        ValueError: If the options do not go together.
        FileNotFoundError: If what they name on this machine is not there.
    """

    data: str | None
    columns: str | None
    queries: str | None
    corpus: str | None
    qrels: str | None
    query_prompt: str | None
    document_prompt: str | None
    demo: Literal["pairs", "retrieval"] | None
    language: Literal["en", "zh"] | None

    def __post_init__(self) -> None:
        parts = (self.queries, self.corpus, self.qrels)
        named = [part for part in parts if part is not None]
        if named and (self.data is not None or len(named) < len(parts)):
            raise ValueError("Retrieval takes --queries, --corpus and --qrels, all three, in place of --data.")
        if self.own and (self.language or self.demo):
            raise ValueError("--language and --demo choose among the demo texts: leave them out with data of your own.")
        if self.columns is not None and self.data is None:
            raise ValueError("--columns is for --data: it says what that table's columns are called.")
        for source in (self.data, *parts):
            check_source(source)

    @property
    def own(self) -> bool:
        """Whether it is no demo text."""
        return self.data is not None or self.queries is not None

    def read(self) -> Data:
        """What is to be measured on; tells in a line what was read.

        Raises:
            ValueError: If a row cannot be read, or there are prompts for what has no queries.
            OSError: If something is not there.
        """
        from st_reba.data.demo import demo_pairs, demo_retrieval
        from st_reba.data.tables import Retrieval, read_data, read_retrieval

        if self.queries is not None and self.corpus is not None and self.qrels is not None:
            found: Data = read_retrieval(self.queries, self.corpus, self.qrels, tell=notes.say)
        elif self.data is not None:
            found = read_data(self.data, self.columns, notes.say)
        else:
            found = read_data((demo_retrieval if self.demo == "retrieval" else demo_pairs)(self.language or "en"))
        if prompts := prompts_of(self.query_prompt, self.document_prompt):
            if not isinstance(found, Retrieval):
                raise ValueError(
                    "--query-prompt and --document-prompt are for retrieval: nothing else here has queries."
                )
            found = replace(found, prompts=prompts)
        return found

    def described(self, found: Data) -> str:
        """What is scored, all that was read or part of it, in a few words."""
        from st_reba.data.tables import Labelled, Retrieval

        items = found.noun if isinstance(found, Labelled) else "plain texts"
        if isinstance(found, Retrieval):
            items = f"{items} on {len(found.documents)} documents"
        source = self.data or self.queries
        if source is None:
            return f"{len(found)} demo {items} in {LANGUAGES[self.language or 'en']}"
        return f"{len(found)} {items} of {source.rstrip('/').rpartition('/')[2]}"


def texts_to_fit(source: str | None) -> list[str]:
    """The plain texts that a command fits something on: every command takes the same ones, so that the model that one
    of them has scored is the model that another one builds.

    Args:
        source: The user's own, as for :func:`st_reba.data.tables.read_texts`; None: all of those in the package.
    """
    from st_reba.data.demo import demo_sentences
    from st_reba.data.tables import read_texts

    return demo_sentences() if source is None else read_texts(source)


def in_asked_language(
    recipes: Sequence[Recipe], asked: Literal["en", "zh"] | None, texts: Literal["en", "zh"]
) -> list[Recipe]:
    """The recipes with prompts in the language that is asked for, or else in that of the texts, which is told.

    Args:
        recipes: As they are named.
        asked: ``--prompt-language``.
        texts: What :func:`st_reba.text.templates.language_of` finds the texts in.

    Raises:
        ValueError: If none of the recipes can ask in the language that is asked for.
    """
    from st_reba.recipes import find
    from st_reba.recipes.lookup import in_language

    if asked is not None and not any(asked in recipe.row.prompt_languages for recipe in recipes):
        raise ValueError(
            f"--prompt-language {asked}: {', '.join(dict.fromkeys(recipe.key for recipe in recipes))} cannot "
            f"ask in {LANGUAGES[asked]}; leave it out, or give a recipe that can, such as prompteol."
        )
    turned = [recipe.row for recipe in recipes if recipe.row.chinese] if asked is None and texts == "zh" else []
    if names := dict.fromkeys(find(row.unchanged or row.key).row.name for row in turned):
        asks = "asks" if len(names) == 1 else "ask"
        notes.say(
            f"The texts are in {LANGUAGES[texts]}, and so {asks} {', '.join(names)}; --prompt-language en keeps the "
            "English prompt."
        )
    return in_language(recipes, asked or texts)
