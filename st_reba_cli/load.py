"""Loading of data and models for commands."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import get_device_name
from transformers.utils import logging as transformers_logging

from st_reba.data.demo import demo_pairs, demo_questions, demo_retrieval, demo_sentences
from st_reba.data.tables import Data, Labelled, Retrieval, read_data
from st_reba.encode import Encoder
from st_reba.evaluation import OddOneOutEvaluator
from st_reba.evaluation.tasks import NO_LABELS
from st_reba.files import is_full
from st_reba.hub.saved_files import check_saved, fetching
from st_reba.modules import CausalTransformer, LlamaCppTransformer
from st_reba.recipes import Recipe
from st_reba.recipes.lookup import in_language
from st_reba.text.presets import PromptLanguage

from .options import check_model
from .printing import console, notes

#: Names of languages by their codes.
LANGUAGES = {"en": "English", "zh": "Chinese"}


def read(
    data: str | None, columns: str | None, separator: str | None, demo: str, prompts: dict[str, str] | None
) -> Labelled:
    """Read the labelled data, or the demo texts without any, and print what was read.

    Raises:
        ValueError: If a row cannot be read or has no label, or there are prompts without queries.
        OSError: If a file is missing.
    """
    if data is not None:
        texts: Data = read_data(data, columns, notes.say, separator=separator)
    else:
        demo_data = demo_retrieval if demo.startswith("retrieval") else demo_pairs
        texts = read_data(demo_data(_language(demo)))
    if prompts:
        if not isinstance(texts, Retrieval):
            raise ValueError(
                "--query-prompt and --document-prompt are for retrieval: these data have no queries. Leave them out."
            )
        texts = replace(texts, prompts=prompts)
    if not isinstance(texts, Labelled):
        raise ValueError(f"{data}: {NO_LABELS}")
    return texts


def prompts_of(query: str | None, document: str | None) -> dict[str, str] | None:
    """Return the prompts of ``encode_query`` and ``encode_document``; None if both are None."""
    if query is None and document is None:
        return None
    return {name: prompt for name, prompt in (("query", query), ("document", document)) if prompt}


def described(data: str | None, demo: str, labelled: Labelled) -> str:
    """Return a short description of the data."""
    items = labelled.noun + (f" on {len(labelled.documents)} documents" if isinstance(labelled, Retrieval) else "")
    if data is None:
        return f"{len(labelled)} demo {items} in {LANGUAGES[_language(demo)]}"
    return f"{len(labelled)} {items} of {data.rstrip('/').rpartition('/')[2]}"


def questions(words: Path | None, data: str | None, demo: str) -> OddOneOutEvaluator | None:
    """Return the word-sense questions of a file, or those in the language of the demo pairs; None: none."""
    if words is None and data is None and demo.startswith("pairs"):
        words = demo_questions(_language(demo))
    return None if words is None else OddOneOutEvaluator.from_csv(words)


def _language(demo: str) -> PromptLanguage:
    """Return the language of demo texts."""
    return "zh" if demo.endswith("-zh") else "en"


def texts_to_fit(source: str | None, columns: str | None = None, separator: str | None = None) -> list[str]:
    """Return the plain texts to fit a filter or weights on.

    They are the same in every command, so that ``build`` builds the model that ``compare`` scored.

    Args:
        source: Plain or labelled texts, as for :func:`st_reba.data.tables.read_data`; None: the sentences of the
            package.
        columns: Names of the columns; None: the default names.
        separator: Separator of the columns; None: the default.

    Raises:
        ValueError: If there are no texts.
    """
    if source is None:
        return demo_sentences()
    texts = read_data(source, columns, scored=False, separator=separator)
    return texts.texts() if isinstance(texts, Labelled) else texts


def say_fitted(what: str, count: int, source: str | None) -> None:
    """Print what is fitted, on how many texts, and whether these are the package's."""
    texts = "texts" if source else "sentences of the package"
    hint = "" if source else " For better vectors give fifty texts or more of your own: --fit-texts."
    console.say(f"Fitting {what} on {count} {texts}.{hint}")


def in_asked_language(recipes: Sequence[Recipe], asked: PromptLanguage | None, texts: PromptLanguage) -> list[Recipe]:
    """Return the recipes with prompts in the requested language, or else in that of the texts, and print the latter.

    Args:
        recipes: The recipes.
        asked: Value of ``--prompt-language``.
        texts: Language of the texts, from :func:`st_reba.text.presets.language_of`.

    Raises:
        ValueError: If no recipe has a prompt in the requested language.
    """
    if asked is not None and not any(asked in recipe.row.prompt_languages for recipe in recipes):
        keys = ", ".join(dict.fromkeys(recipe.key for recipe in recipes))
        problem = f"--prompt-language {asked}: there is no {LANGUAGES[asked]} prompt for {keys}."
        raise ValueError(f"{problem} Leave --prompt-language out, or give a recipe that has one, such as prompteol.")
    names = dict.fromkeys(recipe.row.name for recipe in recipes if recipe.row.chinese)
    if asked is None and texts == "zh" and names:
        notes.say(
            f"The texts are in Chinese, and so are the prompts of {', '.join(names)}. --prompt-language en keeps "
            "English prompts."
        )
    return in_language(recipes, asked or texts)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the logs and progress bars of libraries, which would precede errors each time a model is loaded."""
    transformers_logging.disable_progress_bar()
    levels = {name: logging.getLogger(name).level for name in ("sentence_transformers", "transformers")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def check_devices(device: str | None) -> None:
    """Check that PyTorch can use a device, or several separated by commas.

    Raises:
        ValueError: If it cannot.
    """
    if device is None:
        return
    for name in map(str.strip, device.split(",")):
        try:
            # item() needs a value from the device: "meta" accepts every tensor and computes nothing.
            torch.zeros(1, device=name, dtype=torch.float32).item()
        # The type of the error differs between backends.
        except Exception as error:
            raise ValueError(
                f"--device {name}: PyTorch {torch.__version__} cannot use it here ({_first_line(error)}). Give cpu or "
                f"another available device; the default is {get_device_name()}."
            ) from error


@contextmanager
def usable(model: str, device: str | None = None) -> Iterator[None]:
    """Check model and devices, and name the model in errors of the Hub within the block.

    Raises:
        ValueError: As :func:`check_model`, :func:`check_devices` and :func:`st_reba.hub.saved_files.check_saved`; or if
            the model's weights cannot be read.
        OSError: If the model cannot be downloaded from the Hub.
    """
    check_devices(device)
    check_model(model)
    check_saved(Path(model))
    try:
        with fetching(model):
            yield
    except SafetensorError as error:
        if is_full(error):
            raise
        raise ValueError(
            f"The model {model} has damaged or incomplete weights ({_first_line(error)}). Download or save it again."
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def placement(device: str | None, dtype: str) -> tuple[str, str]:
    """Return the device and the precision; the default precision on a CPU is float32."""
    device = device or get_device_name()
    return device, "float32" if dtype == "auto" and device == "cpu" else dtype


def load_backbone(
    model: str, engine: str, dtype: str, device: str | None, max_seq_length: int | None = None
) -> CausalTransformer | LlamaCppTransformer:
    """Load a language model by either engine; llama.cpp keeps a file's own precision."""
    module: CausalTransformer | LlamaCppTransformer
    with usable(model, device):
        if engine == "llama.cpp":
            module = LlamaCppTransformer(model)
        else:
            where, precision = placement(device, dtype)
            module = CausalTransformer(model, model_kwargs={"dtype": precision}).to(where)
    if max_seq_length is not None:
        module.max_seq_length = max_seq_length
    return module


def load_saved(model: str, revision: str | None, *, dtype: str, device: str | None) -> SentenceTransformer:
    """Load a saved model on a device, in a precision."""
    device, precision = placement(device, dtype)
    return Encoder(model=model, revision=revision, dtype=precision).pinned().load(device)
