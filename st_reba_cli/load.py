"""What commands load: texts, labelled or to fit on; models, placed, in a precision; and libraries kept quiet."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

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
from st_reba.modules import CausalModule, CausalTransformer, LlamaCppTransformer
from st_reba.recipes import Recipe
from st_reba.recipes.lookup import in_language
from st_reba.text.templates import PromptLanguage

from .options import check_model, prompts_of
from .printing import console, notes

Module = TypeVar("Module", bound=CausalModule)

#: By the code of a language, its name.
LANGUAGES = {"en": "English", "zh": "Chinese"}


def read(
    data: str | None,
    columns: str | None,
    separator: str | None,
    demo: str | None,
    query_prompt: str | None,
    document_prompt: str | None,
) -> Labelled:
    """Read what is to be measured on, or the demo texts, and say in a line what was read.

    Raises:
        ValueError: If a row cannot be read, or has no label, or there are prompts for what has no queries.
        OSError: If something is not there.
    """
    if data is not None:
        found: Data = read_data(data, columns, notes.say, separator=separator)
    else:
        kind, _, language = (demo or "pairs").partition("-")
        found = read_data((demo_retrieval if kind == "retrieval" else demo_pairs)("zh" if language else "en"))
    if prompts := prompts_of(query_prompt, document_prompt):
        if not isinstance(found, Retrieval):
            raise ValueError("--query-prompt and --document-prompt are for retrieval: nothing else here has queries.")
        found = replace(found, prompts=prompts)
    if not isinstance(found, Labelled):
        raise ValueError(f"{data}: {NO_LABELS}")
    return found


def described(data: str | None, demo: str | None, found: Labelled) -> str:
    """Return what is scored, in a few words."""
    items = found.noun
    if isinstance(found, Retrieval):
        items = f"{items} on {len(found.documents)} documents"
    if data is None:
        return f"{len(found)} demo {items} in {LANGUAGES['zh' if demo and demo.endswith('-zh') else 'en']}"
    return f"{len(found)} {items} of {data.rstrip('/').rpartition('/')[2]}"


def questions(words: Path | None, data: str | None, demo: str | None) -> OddOneOutEvaluator | None:
    """Return the word-sense questions of a file, or those in the language of the demo pairs; None: none."""
    if words is None and data is None and demo in (None, "pairs", "pairs-zh"):
        words = demo_questions("zh" if demo == "pairs-zh" else "en")
    return None if words is None else OddOneOutEvaluator.from_csv(words)


def texts_to_fit(source: str | None, columns: str | None = None, separator: str | None = None) -> list[str]:
    """Return the plain texts that a command fits something on.

    Every command takes the same ones, so that the model that one of them has scored is the model that another builds.

    Args:
        source: The user's own, plain or labelled, as for :func:`st_reba.data.tables.read_data`; None: all of those in
            the package.
        columns: Names of the columns; None: as usual.
        separator: Of the columns; None: the usual one.

    Raises:
        ValueError: If there are no texts.
    """
    if source is None:
        return demo_sentences()
    found = read_data(source, columns, scored=False, separator=separator)
    return found.texts() if isinstance(found, Labelled) else found


def say_fitted(what: str, count: int, source: str | None) -> None:
    """Say what is fitted on how many texts, and whose they are if they are not the user's own."""
    texts = "texts" if source else "sentences of the package"
    more = "" if source else " For better vectors give fifty texts or more of your own: --fit-texts."
    console.say(f"Fitting {what} on {count} {texts}.{more}")


def in_asked_language(recipes: Sequence[Recipe], asked: PromptLanguage | None, texts: PromptLanguage) -> list[Recipe]:
    """The recipes with prompts in the language that is asked for, or else in that of the texts, which is told.

    Args:
        recipes: As they are named.
        asked: ``--prompt-language``.
        texts: What :func:`st_reba.text.templates.language_of` finds the texts in.

    Raises:
        ValueError: If none of the recipes can ask in the language that is asked for.
    """
    if asked is not None and not any(asked in recipe.row.prompt_languages for recipe in recipes):
        raise ValueError(
            f"--prompt-language {asked}: {', '.join(dict.fromkeys(recipe.key for recipe in recipes))} cannot "
            f"ask in {LANGUAGES[asked]}. Leave --prompt-language out, or give a recipe that can, such as prompteol."
        )
    turned = [recipe.row for recipe in recipes if recipe.row.chinese] if asked is None and texts == "zh" else []
    if names := dict.fromkeys(row.name for row in turned):
        asks = "asks" if len(names) == 1 else "ask"
        notes.say(
            f"The texts are in {LANGUAGES[texts]}, and so {asks} {', '.join(names)}; --prompt-language en keeps the "
            "English prompt."
        )
    return in_language(recipes, asked or texts)


@contextmanager
def quiet() -> Iterator[None]:
    """Without what libraries log, and without their bars: a command says itself what it has to say, and theirs would
    stand before errors, once for each time a model is loaded."""
    transformers_logging.disable_progress_bar()
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    of_st = logging.getLogger("sentence_transformers")
    level = of_st.level
    of_st.setLevel(logging.ERROR)
    try:
        yield
    finally:
        of_st.setLevel(level)
        transformers_logging.set_verbosity(before)


def check_devices(device: str | None) -> None:
    """See that PyTorch can put something on a device, or on several with commas between.

    Raises:
        ValueError: If it cannot, with what it says.
    """
    names = [] if device is None else [part.strip() for part in device.split(",")]
    if len({name.partition(":")[0] for name in names}) > 1:
        # What runs on several refuses different kinds, in words of its own.
        return
    for name in names:
        try:
            # What a device computes comes back; "meta" takes everything and computes nothing.
            torch.zeros(1, device=name, dtype=torch.float32).item()
        # Each backend refuses with an error of another type.
        except Exception as error:
            raise ValueError(
                f"--device {name}: PyTorch {torch.__version__} cannot use it here ({_first_line(error)}). Give cpu, or "
                f"one that is there; without --device it is {get_device_name()}."
            ) from error


@contextmanager
def usable(model: str, device: str | None = None) -> Iterator[None]:
    """Check model and devices; if the model then does not come from the Hub, say so by its name.

    Raises:
        ValueError: As :func:`check_model`, :func:`check_devices` and :func:`st_reba.hub.saved_files.check_saved`; or if
            the model's weights cannot be read.
        OSError: If the Hub does not give the model.
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
            f"The model {model}: its weights are damaged or cut short ({_first_line(error)}). Fetch or save it again."
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def placement(device: str | None, dtype: str) -> tuple[str, str]:
    """Return where to run and in which precision: float32 on a CPU, unless another is asked for."""
    device = device or get_device_name()
    return device, "float32" if dtype == "auto" and device == "cpu" else dtype


def load(
    kind: type[Module], model: str, dtype: str, device: str, max_seq_length: int | None = None, **settings: Any
) -> Module:
    """Load a language model as a module."""
    with usable(model):
        module = kind(model, model_kwargs={"dtype": dtype}, **settings).to(device)
    if max_seq_length is not None:
        module.max_seq_length = max_seq_length
    return module


def load_llama_cpp(model: str, max_seq_length: int | None = None) -> LlamaCppTransformer:
    """A GGUF file at its own size."""
    with usable(model):
        module = LlamaCppTransformer(model)
    if max_seq_length is not None:
        module.max_seq_length = max_seq_length
    return module


def load_backbone(
    model: str, engine: str, dtype: str, device: str | None, max_seq_length: int | None
) -> CausalTransformer | LlamaCppTransformer:
    """Load a language model by either engine."""
    if engine == "llama.cpp":
        return load_llama_cpp(model, max_seq_length)
    where, precision = placement(device, dtype)
    return load(CausalTransformer, model, precision, where, max_seq_length)


def load_saved(model: str, revision: str | None, *, dtype: str, device: str | None) -> SentenceTransformer:
    """Load a saved model to be run."""
    where, precision = placement(device, dtype)
    return Encoder(model=model, revision=revision, dtype=precision).pinned().load(where)
