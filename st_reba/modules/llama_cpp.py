"""A GGUF file at its own size: llama.cpp runs the language model, and every module reads its states."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from ..lm import gguf
from ..lm.anatomy import TOKENS
from ..lm.llama_cpp import END, MODEL_TYPE, LlamaCpp
from .causal_transformer import CausalTransformer
from .checkpoints import Files
from .remote_states import RemoteStates

#: How llama.cpp names the parts of a model that lies in several files.
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


class LlamaCppConfig(PreTrainedConfig):
    """What is saved of a model that llama.cpp runs: which GGUF file it is, by its content, and how large.

    Attributes:
        file: The name of the GGUF file, beside this configuration.
        sha256: Of its content.
        size: Of its content, in bytes.
    """

    model_type = MODEL_TYPE

    file: str = ""
    sha256: str = ""
    size: int = 0
    hidden_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    vocab_size: int = 0
    max_position_embeddings: int = 0

    @classmethod
    def of(cls, model: LlamaCpp, sha256: str) -> Self:
        """That of a loaded file."""
        return cls(
            file=_saved_name(model.file),
            sha256=sha256,
            size=model.file.stat().st_size,
            hidden_size=model.hidden_size,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            vocab_size=model.vocabulary_size,
            max_position_embeddings=model.positions,
            architectures=["LlamaCppModel"],
        )


class LlamaCppModel(RemoteStates):
    """A GGUF file in llama.cpp, in the place of a transformers model.

    Its last hidden states are those of llama.cpp's last layer behind the file's own norm, which runs here: so a module
    may end at any layer, and read with or without the norm. Where an architecture ends in something else, they are
    llama.cpp's, and only they are read.
    """

    config_class = LlamaCppConfig
    config: LlamaCppConfig

    def __init__(self, config: LlamaCppConfig, llama_cpp: LlamaCpp) -> None:
        norm = _norm(llama_cpp)
        super().__init__(config, has_layers=norm is not None, norm=norm)
        #: The file, as llama.cpp has loaded it.
        self.llama_cpp = llama_cpp

    def token_states(self, rows: Sequence[list[int]], layers: Collection[int]) -> list[Mapping[int, Tensor]]:
        found = (self.llama_cpp.states(row, layers) for row in rows)
        return [{layer: torch.from_numpy(states) for layer, states in each.items()} for each in found]

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str,
        *,
        config: LlamaCppConfig | None = None,
        llama_cpp: LlamaCpp | None = None,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Load the GGUF file beside a configuration, if it is the one that the configuration names.

        Args:
            pretrained_model_name_or_path: A directory or a Hub id.
            config: Its configuration; None: it is read.
            llama_cpp: The file, where it is loaded.
            output_loading_info: Whether to return, besides the model, what is missing of it: nothing.
            **kwargs: ``subfolder``, ``revision`` and so on are used; how transformers would hold weights is not.

        Raises:
            FileNotFoundError: If the file is not there.
            ValueError: If it is another one.
        """
        files = Files(pretrained_model_name_or_path, kwargs)
        config = config or LlamaCppConfig.from_pretrained(pretrained_model_name_or_path, **files.where)
        if llama_cpp is None:
            if not re.fullmatch(r"[^/\\]+\.gguf", config.file):
                raise ValueError(f"file={config.file!r}: give the name of a GGUF file that lies beside config.json.")
            file = files.find(config.file)
            if file is None:
                raise FileNotFoundError(
                    f"{pretrained_model_name_or_path} has no {config.file}, the GGUF file that the model runs on: get "
                    f"the whole model, or copy the file of {config.size} bytes with SHA-256 {config.sha256} there."
                )
            if file.stat().st_size != config.size or gguf.digest_of(file) != config.sha256:
                raise ValueError(
                    f"{file} is not the file that the model was saved with ({config.size} bytes, SHA-256 "
                    f"{config.sha256}): its embeddings would be others. Get that file, or build the model anew."
                )
            llama_cpp = LlamaCpp(file)
        if not 1 <= config.num_hidden_layers <= llama_cpp.layers or config.vocab_size != llama_cpp.vocabulary_size:
            raise ValueError(
                f"{config.num_hidden_layers} layers and {config.vocab_size} tokens: {llama_cpp.file} has "
                f"{llama_cpp.layers} and {llama_cpp.vocabulary_size}. Build the model anew."
            )
        config.file = _saved_name(llama_cpp.file)
        model = cls(config, llama_cpp).eval()
        report: dict[str, list[str]] = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
        return (model, report) if output_loading_info else model

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save the configuration and the GGUF file: as a link on the same disk, which takes no room, else as a copy."""
        out = Path(save_directory)
        out.mkdir(parents=True, exist_ok=True)
        place, file = out / self.config.file, self.llama_cpp.file.resolve()
        if not place.exists() or not place.samefile(file):
            place.unlink(missing_ok=True)
            try:
                os.link(file, place)
            except OSError:
                shutil.copyfile(file, place)
        self.config.save_pretrained(out)

    def generate(self, ids: Sequence[int], max_new_tokens: int = 256, **kwargs: Any) -> Iterator[int]:
        """Continue a text, token by token: see :meth:`st_reba.lm.llama_cpp.LlamaCpp.generate`."""
        return self.llama_cpp.generate(ids, max_new_tokens, **kwargs)


def _saved_name(file: Path) -> str:
    """What a file is called in a saved model; those of Ollama have no suffix."""
    return file.with_suffix(gguf.SUFFIX).name


def _norm(model: LlamaCpp) -> nn.Module | None:
    """The norm in a GGUF file that makes last hidden states of those of the last layer; None where none does."""
    weights, epsilon = model.final_norm()
    try:
        found = model.states(TOKENS[0], [0, model.layers, END])
    except ValueError:
        return None
    if "weight" not in weights:
        return None
    norm = (nn.LayerNorm if "bias" in weights else nn.RMSNorm)(model.hidden_size, eps=epsilon)
    norm.load_state_dict({name: torch.from_numpy(values) for name, values in weights.items()})
    norm.requires_grad_(False)
    last, expected = torch.from_numpy(found[model.layers]), torch.from_numpy(found[END])
    return norm if torch.allclose(norm(last), expected, rtol=1e-3, atol=1e-3 * float(expected.std())) else None


class LlamaCppTransformer(CausalTransformer):
    r"""Word i is the last hidden state :math:`v_i` of token i, out of a GGUF file that llama.cpp runs.

    What :class:`CausalTransformer` is to transformers: templates and prompts, at the size that the file has. Any other
    module takes it in the place of a loaded ``Transformer``, if it reads states as they are::

        language_model = LlamaCppTransformer("model.gguf")
        model = st_reba.build(language_model, "echo-topic", texts=texts)
        print(language_model.generate([{"role": "user", "content": "What is the capital of France?"}]))

    A saved model has the GGUF file in it, and is loaded like any other. Texts run one by one, so that an embedding does
    not depend on its batch.

    Args:
        model_name_or_path: A GGUF file: its path, or a name on the Hub (see :func:`st_reba.lm.gguf.as_directory`).
        template: As for :class:`CausalTransformer`.
        **transformer_kwargs: As for :class:`CausalTransformer`.

    Raises:
        FileNotFoundError: If there is no such file.
        ImportError: If xllamacpp or gguf is not installed, or the former is of a release that is called otherwise.
        ValueError: If llama.cpp cannot load the file, or the method changes states or looks at attention.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    def _directory(self, name: str, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        options = kwargs.get("model_kwargs") or {}
        if options.get("gguf_file") is None and not gguf.is_gguf(name):
            if Files(name, options).find("config.json") is not None:
                # A saved model, which has its file in it.
                return name, kwargs
            raise ValueError(f"{name} is not a GGUF file, and llama.cpp runs no other. Use CausalTransformer.")
        file = gguf.located(name, options)
        if _PART.search(file.name):
            raise ValueError(f"{file} is one part of several: merge them first, `llama-gguf-split --merge`.")
        digest = gguf.digest_of(file)
        llama_cpp = LlamaCpp(file)
        directory = gguf.without_weights(file, digest, LlamaCppConfig.of(llama_cpp, digest))
        return str(directory), {**kwargs, "model_kwargs": {"llama_cpp": llama_cpp}}

    def generate(self, prompt: str | Sequence[Mapping[str, str]], *, max_new_tokens: int = 256, **kwargs: Any) -> str:
        """Continue a text, or answer a chat; beside embedding, in another thread, too.

        Args:
            prompt: A text; or messages, ``{"role": ..., "content": ...}``, which go through the model's chat template.
            max_new_tokens: How many tokens at most.
            **kwargs: ``temperature``, ``top_p`` and ``seed``: see :meth:`st_reba.lm.llama_cpp.LlamaCpp.generate`.

        Returns:
            What is new, without special tokens.

        Raises:
            ValueError: If there is no room for it, or messages are given and the file has no chat template.
        """
        tokenizer = self._tokenizer
        if not isinstance(prompt, str):
            if not tokenizer.chat_template:
                raise ValueError("The GGUF file has no chat template: give a text, with the roles written out.")
            messages = [dict(message) for message in prompt]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(prompt)["input_ids"]
        new = cast(LlamaCppModel, self.model).generate(ids, max_new_tokens, **kwargs)
        return str(tokenizer.decode(list(new), skip_special_tokens=True))


AutoConfig.register(LlamaCppConfig.model_type, LlamaCppConfig)
AutoModel.register(LlamaCppConfig, LlamaCppModel)
