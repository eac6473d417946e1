"""Options with several values."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

#: Options that take any number of values.
_SEVERAL = ("--mteb", "--recipes")


class Several(TyperCommand):
    """Reads ``--mteb A B C`` as ``--mteb A --mteb B --mteb C``: an option of click's takes one value at a time."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spread: list[str] = []
        within = ""
        for argument in args:
            if argument.startswith("-"):
                name = argument.partition("=")[0]
                within = name if name in _SEVERAL else ""
            elif within and spread[-1] != within:
                spread.append(within)
            spread.append(argument)
        return super().parse_args(ctx, spread)
