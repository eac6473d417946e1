"""Options with several values."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class ManyTasks(TyperCommand):
    """Reads ``--mteb A B C`` as ``--mteb A --mteb B --mteb C``: an option of click's takes one value at a time."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spread: list[str] = []
        within = False
        for argument in args:
            if argument.startswith("-"):
                within = argument.partition("=")[0] == "--mteb"
            elif within and spread[-1] != "--mteb":
                spread.append("--mteb")
            spread.append(argument)
        return super().parse_args(ctx, spread)
