from __future__ import annotations

import shlex
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from st_reba_cli.several import Several

app = typer.Typer()


@app.command("compare", cls=Several)
def compare(
    model: str = "demo",
    mteb: Annotated[list[str] | None, typer.Option()] = None,
    recipes: Annotated[list[str] | None, typer.Option()] = None,
) -> None:
    print(model, mteb, *([recipes] if recipes else []))


@app.command("other")
def other(names: list[str]) -> None:
    print(names)


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ("compare", "demo None"),
        ("compare --mteb LCQMC", "demo ['LCQMC']"),
        ("compare --mteb LCQMC STSB BQ", "demo ['LCQMC', 'STSB', 'BQ']"),
        ("compare --mteb LCQMC STSB --model m", "m ['LCQMC', 'STSB']"),
        ("compare --model m --mteb=LCQMC STSB", "m ['LCQMC', 'STSB']"),
        ("compare --mteb LCQMC --model m --mteb STSB BQ", "m ['LCQMC', 'STSB', 'BQ']"),
        ("compare --recipes reba-2 prompteol --mteb BQ STSB", "demo ['BQ', 'STSB'] ['reba-2', 'prompteol']"),
        ("compare --recipes 'Echo-2, bidirectional' all", "demo None ['Echo-2, bidirectional', 'all']"),
        ("other a b", "['a', 'b']"),
    ],
)
def test_several_values(arguments, printed):
    result = CliRunner().invoke(app, shlex.split(arguments))
    assert result.output.strip() == printed
    assert result.exit_code == 0


@pytest.mark.parametrize("arguments", ["compare LCQMC", "compare --model m LCQMC", "compare --mteb"])
def test_what_is_no_value_stays_an_error(arguments):
    assert CliRunner().invoke(app, arguments.split()).exit_code == 2
