"""Templates: text with ``{text}`` slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .presets import TEMPLATES

#: Slot of a copy of the text.
TEXT = "{text}"
#: Slot of token prepending, which holds a vector and no token.
PREPEND = "{prepend}"
#: Slot of the prompt, which otherwise goes to the front.
PROMPT = "{prompt}"

#: Most characters of all templates of a module: a configuration that asks for more is a mistake or an attack.
MAX_TEMPLATE_LENGTH = 2**16


@dataclass(frozen=True)
class Template:
    """Literals around the copies of a text.

    Attributes:
        literals: ``literals[i]`` precedes copy i; the last one ends the layout. The first may have one ``{prepend}``
            for the slot of token prepending. One of them may have ``{prompt}``, where the prompt goes.
    """

    literals: tuple[str, ...]

    @classmethod
    def parse(cls, template: str) -> Template:
        """Parse a template or the name of one in :data:`st_reba.TEMPLATES`.

        ``str.format`` is never called: a template may come from the configuration file of somebody else.

        Raises:
            ValueError: If there is no ``{text}``, any other brace, ``{prepend}`` elsewhere than before the text,
                ``{prompt}`` twice, or more than :data:`MAX_TEMPLATE_LENGTH` characters.
        """
        if not isinstance(template, str):
            raise ValueError(f"template must be a string, but {template!r} was given.")
        check_template_length([template])
        literals = TEMPLATES.get(template, template).split(TEXT)
        allowed = f"A template is text with {TEXT} where the input goes, or one of {sorted(TEMPLATES)}."
        if len(literals) == 1:
            raise ValueError(f"The template {template!r} has no {TEXT}. {allowed}")
        # A line break in the place of a slot: what is around it may not become one.
        left = "\n".join([literals[0].replace(PREPEND, "\n", 1), *literals[1:]]).replace(PROMPT, "\n", 1)
        if "{" in left or "}" in left:
            raise ValueError(
                f"The template {template!r} has other braces than {TEXT}, one {PROMPT}, and one {PREPEND} before "
                f"{TEXT}. {allowed} Remove the others."
            )
        return cls(tuple(literals))

    @property
    def copies(self) -> int:
        """Number of copies of the text."""
        return len(self.literals) - 1

    @property
    def takes_prompt(self) -> bool:
        """Whether the prompt has a slot and is not put at the front."""
        return any(PROMPT in literal for literal in self.literals)

    def check_prompt(self, prompt: str) -> None:
        """Raise if the prompt has a slot and is blank.

        Raises:
            ValueError: If it is.
        """
        if self.takes_prompt and not prompt.strip():
            raise ValueError(
                f"The template {str(self)!r} reads a text in terms of a prompt, and no prompt was given: give one, "
                'such as encode(texts, prompt="its topic"), or give the model prompts and a default_prompt_name.'
            )

    def __str__(self) -> str:
        return TEXT.join(self.literals)


def check_template_length(templates: Sequence[str]) -> None:
    """Raise if templates would take minutes to tokenize.

    Raises:
        ValueError: If they have more than :data:`MAX_TEMPLATE_LENGTH` characters.
    """
    length = sum(map(len, templates))
    if length > MAX_TEMPLATE_LENGTH:
        problem = f"{length:,} characters of templates were given, and at most {MAX_TEMPLATE_LENGTH:,} are allowed:"
        raise ValueError(f"{problem} shorten the text around the input.")
