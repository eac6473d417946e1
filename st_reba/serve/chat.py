"""Chat with the language model that embeds: handlers of transformers' server on one loaded model.

Needs the extra ``serve-chat``: ``pip install "st-reba[serve-chat]"``. No other file uses transformers' server, which is
not part of its documented interface.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import uuid
from typing import Annotated, Any, cast

import torch
from fastapi import Response
from jinja2 import TemplateError
from pydantic import ConfigDict, Field
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel, __version__

from ..hub.checkpoints import check_checkpoint, missing_weights
from ..lm.gguf import as_directory
from ..lm.views import body_of, decoder_of
from ..modules import CausalModule
from ..settings import NO_LIMIT
from .models import MAX_CHARACTERS, Embedder, share
from .requests import Form, RefusedError, Text, shorten

try:
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.utils import GenerateManager, GenerationState

    #: Methods that are overridden here.
    OVERRIDDEN = (
        *(ChatCompletionHandler._build_generation_config, CompletionHandler._build_generation_config),
        *(ModelManager.load_model_and_processor, GenerationState.get_manager),
        *(GenerateManager.generate_streaming, GenerateManager.generate_non_streaming),
    )
# NameError: without openai, names in annotations are missing.
except (AttributeError, ImportError, NameError) as error:
    raise ImportError(
        f"Chat needs openai and the server of transformers 5.23; here is transformers {__version__}: "
        'pip install "st-reba[serve-chat]" transformers==5.23.0.'
    ) from error


class ChatForm(Form):
    """Body of ``/v1/chat/completions``. transformers reads its other fields."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionForm(Form):
    """Body of ``/v1/completions``. transformers reads its other fields."""

    model_config = ConfigDict(extra="allow")

    model: str
    prompt: Text


class Chat:
    """Chat and completions of an embedder's language model.

    Args:
        embedder: Embedder that reads a causal language model. Requests give its name.
        lm: The language model with its head. None: one on the embedder's weights, whose input embeddings are the head.

    Attributes:
        lm: The language model with its head.
        idle: Set unless a chat waits for its first token. Batches of texts start only while it is set.
        forms: Forms of requests by path.

    Raises:
        ValueError: If ``lm`` is None and the embedder has no whole language model.
    """

    forms = {"/v1/chat/completions": ChatForm, "/v1/completions": CompletionForm}

    def __init__(self, embedder: Embedder, lm: PreTrainedModel | None = None) -> None:
        self.name, self._tokenizer = embedder.name, embedder.tokenizer.tokenizer
        self.lm = with_head(embedder) if lm is None else lm
        self.idle = threading.Event()
        self.idle.set()
        positions = causal_module(embedder).lm.positions or NO_LIMIT
        loaded = _OneModel(self.lm, self._tokenizer), _Turns(self.idle, positions)
        self._handlers: dict[type[Form], Any] = {ChatForm: _Chat(*loaded), CompletionForm: _Completion(*loaded)}

    async def answer(self, form: ChatForm | CompletionForm) -> Response:
        """Answer a request.

        Raises:
            RefusedError: If it cannot be answered.
        """
        body = form.model_dump(exclude_unset=True)
        if form.model != self.name:
            message = f'There is no model "{shorten(form.model)}" here that chats: give "{self.name}".'
            raise RefusedError(404, message, param="model", code="model_not_found")
        # Settings of tokenization and generation that could exhaust the machine.
        unfit = {"generation_config"} & body.keys()
        if isinstance(form, ChatForm):
            if not self._tokenizer.chat_template:
                raise RefusedError(400, f"{self.name} has no chat template: send a prompt to /v1/completions.")
            reserved = inspect.signature(self._tokenizer.apply_chat_template).parameters
            unfit |= reserved.keys() & (form.chat_template_kwargs or {})
        if unfit:
            raise RefusedError(400, f"Unknown parameter: '{min(unfit)}'.", param=min(unfit), code="unknown_parameter")
        if len(str(body)) > MAX_CHARACTERS:
            raise _too_long(f"request has more than {MAX_CHARACTERS:,} characters")
        try:
            return await self._handlers[type(form)].handle_request(body, f"chatcmpl-{uuid.uuid4().hex}")
        # A template may refuse messages, and generation a value.
        except (AttributeError, KeyError, TypeError, ValueError, TemplateError) as error:
            reason = f"{type(error).__name__}: {shorten(error, 200)}"
            raise RefusedError(400, f"The request cannot be answered ({reason}): change its fields.") from error


class _OneModel(ModelManager):
    """Manager of one loaded model, which loads no other."""

    def __init__(self, lm: PreTrainedModel, tokenizer: Any) -> None:
        super().__init__()
        self._loaded = lm, tokenizer

    def load_model_and_processor(self, *args: Any, **kwargs: Any) -> Any:
        return self._loaded


class _Turns(GenerateManager, GenerationState):
    """State of all handlers: chats run in one thread, each within the model's positions."""

    def __init__(self, idle: threading.Event, positions: int) -> None:
        GenerationState.__init__(self)
        GenerateManager.__init__(self)
        self._idle, self._positions = idle, positions

    def get_manager(self, *args: Any, **kwargs: Any) -> GenerateManager:
        return self

    def generate_streaming(self, *given: Any, **more: Any) -> Any:
        return super().generate_streaming(*self._turn(*given), **more)

    async def generate_non_streaming(self, *given: Any, **more: Any) -> Any:
        turn, *others = self._turn(*given)
        try:
            # The thread sets the result of a future, which must not be cancelled then.
            return await asyncio.shield(super().generate_non_streaming(turn, *others, **more))
        except asyncio.CancelledError:
            turn.is_left = True
            raise

    def _turn(self, lm: PreTrainedModel, processor: Any, inputs: Any, config: Any, *others: Any) -> tuple[Any, ...]:
        length = inputs["input_ids"].shape[-1]
        if length >= self._positions:
            raise _too_long(f"prompt has {length} tokens, and prompt and answer may have {self._positions}")
        config.max_new_tokens = min(config.max_new_tokens, self._positions - length)
        return (_Turn(lm, self._idle), processor, inputs, config, *others)


class _Turn:
    """Language model in one generation.

    Attributes:
        is_left: Whether the client has left, so that the next token is the last.
    """

    def __init__(self, lm: Any, idle: threading.Event) -> None:
        self._lm, self._idle, self.is_left = lm, idle, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def generate(self, **inputs: Any) -> Any:
        self._idle.clear()
        try:
            return self._lm.generate(**inputs, stopping_criteria=[self._after_token])
        finally:
            self._idle.set()

    def _after_token(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._idle.set()
        return torch.full((len(ids),), self.is_left, device=ids.device)


class _Sampling:
    """Mixin of handlers: a temperature samples, whatever the model's default is."""

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        config = super()._build_generation_config(body, *args, **kwargs)  # type: ignore[misc]
        if body.get("temperature"):
            config.do_sample = True
        return config


class _Chat(_Sampling, ChatCompletionHandler): ...


class _Completion(_Sampling, CompletionHandler): ...


def _too_long(reason: str) -> RefusedError:
    return RefusedError(400, f"The {reason}: send less.", code="context_length_exceeded")


def causal_module(embedder: Embedder) -> CausalModule:
    """Return the module of an embedder that reads a causal language model of transformers.

    Raises:
        ValueError: If there is none.
    """
    module = embedder.model[0]
    if isinstance(module, CausalModule) and type(module.model.config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return module
    raise ValueError(
        f"{embedder.name} begins with {type(module).__name__}, which has no language model of transformers that "
        "generates: serve it without --chat, or give a model that st-reba build has made of one."
    )


def with_head(embedder: Embedder) -> PreTrainedModel:
    """Return an embedder's language model with its head, on the same weights.

    Raises:
        ValueError: If the recipe ends at an earlier layer, or the head is neither there nor the input embeddings.
    """
    module = causal_module(embedder)
    view: Any = body_of(module.model)
    # The module's own has no cache, and the attention of st_reba.
    view.config.use_cache, view.config._attn_implementation = True, None
    with torch.device("meta"):
        lm: Any = AutoModelForCausalLM.from_config(view.config)
    path = next((path for path, part in lm.named_modules() if type(part) is type(view)), None)
    lacks = "the output head"
    if module.output_layer is not None:
        lacks = f"the layers after {module.output_layer}"
    elif path is not None:
        lm.set_submodule(path, view)
        lm.tie_weights()
    if any(weight.is_meta for weight in lm.parameters()):
        raise ValueError(
            f"{embedder.name} lacks {lacks} of its language model: give the one that it was built from, --lm PATH."
        )
    # A saved recipe has no generation_config.json, which would name the end of a turn.
    ends = lm.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    ends = {*ends, embedder.tokenizer.tokenizer.eos_token_id} - {None}
    lm.generation_config.eos_token_id = sorted(ends) or None
    return lm.eval()


def load_whole(path: str, embedder: Embedder) -> PreTrainedModel:
    """Load the language model that an embedder was built from, and let the embedder read its weights.

    Raises:
        ValueError: If the embedder's weights are not the language model's, or the checkpoint has no head.
    """
    model, auto = causal_module(embedder).model, cast(Any, AutoModelForCausalLM)
    directory, _ = as_directory(path, {"model_kwargs": {"dtype": model.dtype}})
    check_checkpoint(directory, {}, {})
    lm, report = auto.from_pretrained(directory, dtype=model.dtype, output_loading_info=True)
    if missing := missing_weights(report):
        raise ValueError(f"--lm {path} lacks {next(iter(missing))}: give a whole language model, with its output head.")
    if differing := share(model, decoder_of(lm.to(model.device))):
        raise ValueError(
            f"--lm {path} is not the language model of {embedder.name}: {differing} differs. Give the model that it "
            "was built from; a server has one set of weights."
        )
    return lm.eval()
