"""GGUF files run by llama.cpp, quantised as they are: states of every token after every layer, and generation.

llama.cpp comes in the wheel of ``xllamacpp``, whose extension exports llama.cpp's C interface. :data:`_FUNCTIONS` lists
what is called of it. States are read by the callback that llama.cpp calls while it computes a graph (``cb_eval``, in
the public header since 2023), by the names of its tensors. So neither the layers above the last one that is wanted run,
nor the output head, which is most of a small model with a large vocabulary.

A text runs alone: products of quantised weights round otherwise in batches of other sizes, by up to 2e-3 of a cosine,
and an embedding would depend on its batch.
"""

from __future__ import annotations

import ctypes
import re
import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import TopPLogitsWarper

from ..optional import require

#: Release of xllamacpp that this was tested with.
TESTED = "2026.10.11549"

#: ``model_type`` of a saved configuration. The weights stay in their GGUF file.
MODEL_TYPE = "st_reba_llama_cpp"

#: Key of the last hidden states among those of layers, which are counted from 1; 0 is the input of the first.
END = -1

# Names of tensors in llama.cpp. The input of the first layer is the last of these that an architecture computes.
_ENTERING = (b"embd", b"inp_embd", b"inp_scaled")
_ENDS = (b"result_norm", b"result_embd_pooled")
_LAYER = re.compile(rb"l_out-(\d+)")

#: Number of tokens that run at a time. More are not faster on a CPU, and llama.cpp keeps the logits of each token.
_PART = 64
#: Number of tokens that a context has room for at first.
_ROOM = 512

_Watch = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
_Log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_LOG_LEVEL_ERROR = 4


class _Opaque(ctypes.Structure):
    """Structure of llama.cpp that is passed from one function to another, and is smaller than this."""

    _fields_ = [("bytes", ctypes.c_byte * 512)]


#: First fields of ``llama_context_params``, with their defaults. Where a later release has moved a field, some differ.
_CONTEXT: Sequence[tuple[Any, Mapping[str, Any]]] = [
    (ctypes.c_uint32, {"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_rs_seq": 0}),
    (ctypes.c_uint32, {"n_outputs_max": 0, "n_outputs_max_per_seq": 1}),
    (ctypes.c_int32, {"n_threads": 4, "n_threads_batch": 4, "ctx_type": 0, "rope_scaling_type": -1}),
    (ctypes.c_int32, {"pooling_type": -1, "attention_type": -1, "flash_attn_type": -1}),
    (ctypes.c_float, {"rope_freq_base": 0.0, "rope_freq_scale": 0.0, "yarn_ext_factor": -1.0}),
    (ctypes.c_float, {"yarn_attn_factor": -1.0, "yarn_beta_fast": -1.0, "yarn_beta_slow": -1.0}),
    (ctypes.c_uint32, {"yarn_orig_ctx": 0}),
    (ctypes.c_float, {"defrag_thold": -1.0}),
    (ctypes.c_void_p, {"cb_eval": None, "cb_eval_user_data": None}),
    (ctypes.c_int32, {"type_k": 1, "type_v": 1}),
]


class _ContextParams(ctypes.Structure):
    """``llama_context_params``."""

    _fields_ = [*((name, kind) for kind, names in _CONTEXT for name in names), ("rest", ctypes.c_byte * 400)]


class _GgufParams(ctypes.Structure):
    """``gguf_init_params``."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p)]


_POOLING_NONE = 0
#: Type float32 of a value in a header, and of a tensor.
_HEADER_FLOAT32, _TENSOR_FLOAT32 = 6, 0

#: Flags of ``llama_model_params`` and their place. llama.cpp sets the one that lets it keep copies of weights in
#: another order. These were not faster, and take half as much memory again.
_FLAGS, _FLAGS_AT, _KEEPS_COPIES_AT = [0, 0, 1, 0, 0], 72, 74

_POINTER, _INT, _SIZE, _STRING = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t, ctypes.c_char_p
#: Functions of llama.cpp that are called: what they return, what they take, and their names.
_FUNCTIONS: Sequence[tuple[Any, list[Any], str]] = [
    (None, [], "llama_backend_init"),
    (None, [_POINTER], "gguf_free llama_free llama_model_free"),
    (None, [_POINTER, _POINTER, _SIZE, _SIZE], "ggml_backend_tensor_get"),
    (None, [_Log, _POINTER], "llama_log_set"),
    (None, [_POINTER, ctypes.c_bool], "llama_memory_clear llama_set_embeddings"),
    (None, [_POINTER, _INT, _INT], "llama_set_n_threads"),
    (_STRING, [_POINTER], "ggml_get_name"),
    (_SIZE, [_POINTER], "ggml_nbytes gguf_get_data_offset"),
    (_SIZE, [_POINTER, ctypes.c_int64], "gguf_get_tensor_offset"),
    (ctypes.c_int64, [_POINTER, _STRING], "gguf_find_key gguf_find_tensor"),
    (_INT, [_POINTER, ctypes.c_int64], "gguf_get_kv_type gguf_get_tensor_type"),
    (ctypes.c_float, [_POINTER, ctypes.c_int64], "gguf_get_val_f32"),
    (_STRING, [_POINTER, ctypes.c_int64], "gguf_get_val_str"),
    (_POINTER, [_STRING, _GgufParams], "gguf_init_from_file"),
    (_Opaque, [_POINTER, _INT], "llama_batch_get_one"),
    (_ContextParams, [], "llama_context_default_params"),
    (_INT, [_POINTER, _Opaque], "llama_decode"),
    (ctypes.POINTER(ctypes.c_float), [_POINTER, _INT], "llama_get_logits_ith"),
    (_POINTER, [_POINTER], "llama_get_memory llama_model_get_vocab"),
    (_POINTER, [_POINTER, _ContextParams], "llama_init_from_model"),
    (_Opaque, [], "llama_model_default_params"),
    (ctypes.c_bool, [_POINTER], "llama_model_has_encoder"),
    (_POINTER, [_STRING, _Opaque], "llama_model_load_from_file"),
    (_INT, [_POINTER], "llama_model_n_ctx_train llama_model_n_embd llama_model_n_layer llama_vocab_n_tokens"),
    (ctypes.c_bool, [_POINTER, _INT], "llama_vocab_is_eog"),
]

#: Last error messages of llama.cpp, which returns no reasons.
_complaints: deque[str] = deque(maxlen=8)


@_Log  # type: ignore[untyped-decorator]
def _note(level: int, message: bytes | None, _: Any) -> None:
    if level == _LOG_LEVEL_ERROR and message:
        _complaints.append(message.decode(errors="replace").strip())


@cache
def library() -> ctypes.CDLL:
    """Return llama.cpp, ready to be called.

    Raises:
        ImportError: If xllamacpp is not installed, or is of a release with another interface.
    """
    package = require("xllamacpp", "llamacpp", "llama.cpp")
    llama = ctypes.CDLL(package.xllamacpp.__file__)
    wrong = []
    for returns, takes, names in _FUNCTIONS:
        for name in names.split():
            if function := getattr(llama, name, None):
                function.restype, function.argtypes = returns, takes
            else:
                wrong.append(name)
    if not wrong:
        params = llama.llama_context_default_params()
        defaults = [default for _, fields in _CONTEXT for default in fields.items()]
        wrong = [f"llama_context_params.{name}" for name, value in defaults if getattr(params, name) != value]
    if wrong:
        raise ImportError(
            f"xllamacpp {package.__version__} brings a llama.cpp with another interface ({', '.join(wrong[:3])}): "
            f'install the release that st_reba was tested with: pip install "xllamacpp=={TESTED}".'
        )
    llama.llama_log_set(_note, None)
    llama.llama_backend_init()
    return llama


class LlamaCpp:
    """A GGUF file that llama.cpp has loaded, whose weights serve embedding and generation.

    Each of the two has a context, so that one thread embeds while another generates. Two threads that embed wait for
    each other.

    Args:
        file: The GGUF file.

    Raises:
        ImportError: As for :func:`library`.
        ValueError: If llama.cpp cannot load it, or it is not a decoder.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._library = library()
        _complaints.clear()
        params = self._library.llama_model_default_params()
        # Other flags of a later release stay.
        if params.bytes[_FLAGS_AT : _FLAGS_AT + len(_FLAGS)] == _FLAGS:
            params.bytes[_KEEPS_COPIES_AT] = 0
        model = self._library.llama_model_load_from_file(str(file).encode(), params)
        if not model:
            # The first is the cause, the others are its consequences.
            reason = _complaints[0] if _complaints else "it gives no reason"
            raise ValueError(
                f"{file}: llama.cpp cannot load it ({reason}). A file that was cut off must be fetched again; for an "
                "architecture that is newer than the installed xllamacpp, use a later one."
            )
        self.hidden_size = int(self._library.llama_model_n_embd(model))
        self._reading = _Context(self._library, model, file, self.hidden_size)
        self._writing = _Context(self._library, model, file)
        weakref.finalize(self, _release, self._library, model, [self._reading, self._writing])
        if self._library.llama_model_has_encoder(model):
            raise ValueError(f"{file} has an encoder: st_reba needs a decoder-only (causal) language model.")
        self.layers = int(self._library.llama_model_n_layer(model))
        self.positions = int(self._library.llama_model_n_ctx_train(model))
        self._vocabulary = self._library.llama_model_get_vocab(model)
        self.vocabulary_size = int(self._library.llama_vocab_n_tokens(self._vocabulary))

    def __deepcopy__(self, memo: dict[int, Any]) -> LlamaCpp:
        """Return itself: views of a model share it."""
        return self

    def __reduce__(self) -> tuple[type[LlamaCpp], tuple[Path]]:
        """Let another process load the file, which the system keeps in memory once."""
        return LlamaCpp, (self.file,)

    def final_norm(self) -> tuple[dict[str, NDArray[np.float32]], float]:
        """Return weight and bias, (D,), of the norm after the last layer, those that there are, and its epsilon."""
        library, weights, epsilon = self._library, {}, 1e-5
        header = library.gguf_init_from_file(str(self.file).encode(), _GgufParams(True, None))
        architecture = library.gguf_get_val_str(header, library.gguf_find_key(header, b"general.architecture"))
        for kind in (b"layer_norm_epsilon", b"layer_norm_rms_epsilon"):
            key = library.gguf_find_key(header, architecture + b".attention." + kind)
            if key >= 0 and library.gguf_get_kv_type(header, key) == _HEADER_FLOAT32:
                epsilon = library.gguf_get_val_f32(header, key)
        for name in ("weight", "bias"):
            place = library.gguf_find_tensor(header, f"output_norm.{name}".encode())
            if place >= 0 and library.gguf_get_tensor_type(header, place) == _TENSOR_FLOAT32:
                offset = library.gguf_get_data_offset(header) + library.gguf_get_tensor_offset(header, place)
                weights[name] = np.fromfile(self.file, np.float32, self.hidden_size, offset=offset)
        library.gguf_free(header)
        return weights, epsilon

    def states(self, ids: Sequence[int], layers: Collection[int]) -> dict[int, NDArray[np.float32]]:
        """Return the states of every token of one text.

        Args:
            ids: Its n token ids.
            layers: Layers, counted from 1; 0 for the input of the first; :data:`END` for the last hidden states.

        Returns:
            States after each of these layers, (n, D).

        Raises:
            ValueError: If llama.cpp does not show one of them in this architecture.
            RuntimeError: If llama.cpp cannot run it.
        """
        with self._reading.lock:
            self._reading.run(ids, room=len(ids), layers=layers)
            found = {layer: np.concatenate(parts) for layer, parts in self._reading.states.items() if parts}
        for layer in layers:
            if layer not in found or len(found[layer]) != len(ids):
                shown = "last hidden states" if layer == END else f"the states after layer {layer}"
                problem = f"{self.file.name}: llama.cpp does not show {shown} in this architecture."
                raise ValueError(f"{problem} Use a recipe that does not read them, or load the model in transformers.")
        return found

    def generate(
        self,
        ids: Sequence[int],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> Iterator[int]:
        """Continue a text, token by token, until the model ends it.

        Args:
            ids: Token ids, special ones included.
            max_new_tokens: Number of tokens, at most.
            temperature: 0 takes the most likely token each time.
            top_p: Probability of the most likely tokens together, from which one is drawn.
            seed: Seed of the draws; None for another one each time.

        Raises:
            ValueError: If the model has not enough positions.
            RuntimeError: If llama.cpp cannot run it.
        """
        if not 1 <= len(ids) <= self.positions - max_new_tokens:
            raise ValueError(
                f"{len(ids)} tokens and {max_new_tokens} new ones: {self.file.name} has {self.positions} positions, "
                "and needs one token to go on from. Give less."
            )
        generator = torch.Generator()
        generator.manual_seed(generator.seed() if seed is None else seed)
        with self._writing.lock:
            new, room = ids, len(ids) + max_new_tokens
            for count in range(max_new_tokens):
                self._writing.run(new, room=room, goes_on=count > 0)
                token = _draw(self._writing.logits(self.vocabulary_size), temperature, top_p, generator)
                if self._library.llama_vocab_is_eog(self._vocabulary, token):
                    return
                yield token
                new = [token]


class _Context:
    """Context of llama.cpp, made when it is first used, and again when more room is needed.

    Args:
        library: llama.cpp.
        model: Its model.
        file: Source of the model.
        hidden_size: Number of values in a state; 0 for a context that generates, whose states are not copied.

    Attributes:
        lock: Held by the thread that runs it.
        states: States of each part of the text that ran last, for each layer that was wanted.
    """

    def __init__(self, library: ctypes.CDLL, model: int, file: Path, hidden_size: int = 0) -> None:
        self.lock = threading.Lock()
        self.states: dict[int, list[NDArray[np.float32]]] = {}
        self._library, self._model, self._file, self._hidden_size = library, model, file, hidden_size
        # An attribute, because llama.cpp has its address.
        self._watch = _Watch(self._copy) if hidden_size else None
        self._pointer: int | None = None
        self._room, self._last, self._part = 0, END, 0

    def run(self, ids: Sequence[int], *, room: int, layers: Collection[int] = (), goes_on: bool = False) -> None:
        """Run tokens, part by part: from the beginning, or after those that ran before."""
        if self._room < room:
            self._make(room)
        # Which tensor is the input of the first layer is known where that layer ends.
        self._last = END if END in layers else max((1, *layers))
        self.states = {layer: [] for layer in {*layers, self._last}}
        threads = torch.get_num_threads()
        self._library.llama_set_n_threads(self._pointer, threads, threads)
        if not goes_on:
            self._library.llama_memory_clear(self._library.llama_get_memory(self._pointer), False)
        for self._part, start in enumerate(range(0, len(ids), _PART)):
            part = ids[start : start + _PART]
            # A variable, because llama.cpp reads it when it decodes.
            tokens = (_INT * len(part))(*part)
            batch = self._library.llama_batch_get_one(tokens, len(part))
            if failed := self._library.llama_decode(self._pointer, batch):
                raise RuntimeError(f"{self._file}: llama.cpp could not run {len(ids)} tokens (llama_decode: {failed}).")

    def _copy(self, tensor: int, asks: bool, _: Any) -> bool:
        """Return whether the result of a step of a graph is wanted, where llama.cpp asks; else copy it.

        The graph ends, by a result of False, with the last of the layers that are wanted.
        """
        name = self._library.ggml_get_name(tensor)
        layer = END if name in _ENDS else None
        if name in _ENTERING:
            layer = 0
        elif match := _LAYER.fullmatch(name):
            layer = int(match[1]) + 1
        if asks or layer is None:
            return layer in self.states
        rows = self._library.ggml_nbytes(tensor) // 4 // self._hidden_size
        states = np.empty((rows, self._hidden_size), np.float32)
        self._library.ggml_backend_tensor_get(tensor, states.ctypes.data, 0, states.nbytes)
        # Several tensors may enter the first layer: the last one that is computed does.
        self.states[layer][self._part :] = [states]
        return layer != self._last

    def logits(self, vocabulary_size: int) -> Tensor:
        """Return the logits of the last token that ran, (V,)."""
        pointer = self._library.llama_get_logits_ith(self._pointer, -1)
        return torch.from_numpy(np.ctypeslib.as_array(pointer, (vocabulary_size,)).copy())

    def free(self) -> None:
        """Free its memory."""
        if self._pointer:
            self._library.llama_free(self._pointer)
        self._pointer, self._room = None, 0

    def _make(self, room: int) -> None:
        self.free()
        params = self._library.llama_context_default_params()
        # A power of two, to make few contexts.
        params.n_ctx = max(_ROOM, 1 << (room - 1).bit_length())
        params.n_batch = params.n_ubatch = _PART
        params.pooling_type = _POOLING_NONE
        params.cb_eval = ctypes.cast(self._watch, ctypes.c_void_p) if self._watch else None
        self._pointer = self._library.llama_init_from_model(self._model, params)
        if not self._pointer:
            raise RuntimeError(
                f"{self._file}: llama.cpp finds no memory for {params.n_ctx} tokens. Use a smaller max_seq_length."
            )
        self._room = params.n_ctx
        self._library.llama_set_embeddings(self._pointer, self._watch is not None)


def _release(library: ctypes.CDLL, model: int, contexts: Sequence[_Context]) -> None:
    """Free the contexts of a model, and then the model."""
    for context in contexts:
        context.free()
    library.llama_model_free(model)


def _draw(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    scores = TopPLogitsWarper(top_p)(cast(Any, None), logits[None] / temperature)
    return int(torch.multinomial(scores.softmax(dim=1), 1, generator=generator))
