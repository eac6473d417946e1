"""What ``--json`` prints: one object a command, whose fields stay while the number behind its schema's name does."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from st_reba.compare.cost import Forecast


class Built(BaseModel):
    """``st-reba build``."""

    path: str = Field(description="The directory that was written.")
    family: str = Field(description="The class of sentence-transformers that loads it.")
    recipe: str | None = Field(description="The recipe's key; null with --rerank.")
    load: str = Field(description="Python that loads it.")


class EncodedFile(BaseModel):
    """``st-reba encode``."""

    path: str = Field(description="The file or directory that was written, or its URL.")
    rows: int = Field(description="Vectors.")
    texts: int = Field(description="Texts.")
    resumed: int = Field(description="Vectors that an interrupted run had left.")


class Pushed(BaseModel):
    """``st-reba push``."""

    url: str = Field(description="The commit, or the pull request.")
    repo_id: str = Field(description="The repository.")
    revision: str | None = Field(description="The branch; null for the main one.")
    pull_request: bool = Field(description="Whether it is proposed, and not yet pushed.")
    load: str = Field(description="Python that loads it.")


class Verified(BaseModel):
    """``st-reba verify``, whose exit code is 1 if the vectors differ."""

    url: str = Field(description="What was asked.")
    model: str = Field(description="The saved model.")
    equal: bool = Field(description="Whether the server gives the model's vectors.")
    causes: list[str] = Field(description="Differences that were found.")
    tolerance: float = Field(description="Largest distance allowed.")
    distance: float = Field(description="Greatest distance of two vectors of length 1.")


class Forecasted(BaseModel):
    """``st-reba compare --dry-run``."""

    recipes: int = Field(description="How many, controls left out.")
    texts: int = Field(description="How many.")
    tokens: float = Field(description="To run.")
    tokens_per_second: float = Field(description="As measured here.")
    seconds: float = Field(description="Of the clock, about.")
    memory: int = Field(description="Bytes at the peak, about.")
    weights: int = Field(description="Bytes of the weights.")


def forecasted(expected: Forecast) -> Forecasted:
    """A forecast in the form that is printed."""
    return Forecasted(
        recipes=expected.recipes, texts=expected.texts, tokens=expected.tokens, tokens_per_second=expected.speed,
        seconds=expected.seconds, memory=expected.memory, weights=expected.weights,
    )  # fmt: skip


#: By the name of the command. compare prints what is in comparison.json.
SCHEMAS: dict[str, type[BaseModel]] = {
    "build": Built, "encode": EncodedFile, "forecast": Forecasted, "push": Pushed, "verify": Verified,
}  # fmt: skip


def write_json(command: str, found: BaseModel | dict[str, Any]) -> None:
    """Print what a command found, with the name and the number of its schema before it."""
    told = found.model_dump() if isinstance(found, BaseModel) else found
    sys.stdout.write(json.dumps({"schema": f"st-reba/{command}/1", **told}, ensure_ascii=False, indent=1) + "\n")
