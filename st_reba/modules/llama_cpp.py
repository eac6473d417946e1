"""GGUF files at their own size: llama.cpp runs the language model, and methods read its states."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from ..hub.checkpoints import Files
from ..hub.saved_files import read_object
from ..lm import gguf
from ..lm.llama_cpp import END, MODEL_TYPE, LlamaCpp
from ..lm.model import LanguageModel
from ..lm.parts import ModelParts
from ..lm.passes import Hook
from ..lm.prefixes import PrefixCache
from ..lm.views import shallow_copy
from ..settings import check
from ..text.layout import Layout
from .causal import CausalTransformer

#: End of the names of files that contain a part of a model.
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


class LlamaCppConfig(PreTrainedConfig):
    """Configuration of a model that llama.cpp runs: its GGUF file, by the file's content, and its size.

    Attributes:
        file: Name of the GGUF file in the folder of this configuration.
        sha256: Digest of its content.
        size: Number of its bytes.
    """

    model_type = MODEL_TYPE

    file: str = ""
    sha256: str = ""
    size: int = 0
    hidden_size: int = 0
    num_hidden_layers: int = 0
    vocab_size: int = 0
    max_position_embeddings: int = 0


class RemoteModel(LanguageModel):
    """A causal language model that runs elsewhere: its states can be read, and not changed.

    Args:
        model: The model.
        output_layer: Layer after which to stop, counted from 1; None for the last.
    """

    model: LlamaCppModel

    def __init__(self, model: LlamaCppModel, output_layer: int | None = None) -> None:
        self.model = cast(LlamaCppModel, shallow_copy(model))
        self.prefixes = PrefixCache()
        config, layers = self.model.config, self.model.layers
        if output_layer is not None:
            check("output_layer", output_layer, bool(layers), f"layers of {type(model).__name__} were not found here.")
            del layers[output_layer:]
            config.num_hidden_layers = output_layer
        paths = tuple(f"layers.{index}" for index in range(len(layers)))
        widths = (config.hidden_size,) * (len(layers) + 1)
        parts = ModelParts(is_causal=True, layers=paths, norm=("norm",) if layers else None, widths=widths)
        self.model.st_reba_parts = {config.num_hidden_layers: parts}  # type: ignore[assignment]

    def _run(self, layout: Layout, *hooks: Hook, **inputs: Any) -> Tensor:
        numbers = {layer: number for number, layer in enumerate(self.model.layers, start=1)}
        calls = [(numbers.get(module, 0), module, hook) for hook in hooks for module in hook.modules]
        calls.sort(key=lambda call: call[0])
        if inputs or (calls and calls[0][0] == 0):
            raise ValueError(_REFUSAL)
        last = END if self.model.norm is None else len(numbers)
        # Padding does not run, and states that no hook reads are not fetched.
        pairs = zip(layout.input_ids.tolist(), layout.lengths.tolist(), strict=True)
        rows = [ids[: max(1, length)] for ids, length in pairs]
        read = {number for number, _, _ in calls}
        states = self.model.token_states(rows, sorted({last, *read, *(number - 1 for number in read)}))
        for number, module, hook in calls:
            before, after = states[number - 1], states[number]
            if hook.before(module, before) is not before or hook.after(module, after) is not after:
                raise ValueError(_REFUSAL)
        return states[last] if self.model.norm is None else cast(Tensor, self.model.norm(states[last]))


_REFUSAL = (
    "The language model runs elsewhere: it reads token ids alone, and its states can be looked at, and not changed. "
    "Use what reads states as they are: CausalTransformer, EchoModule, MetaEOLModule, TopicModule (classical, "
    "prompteol, echo-2, meta-eol, topic, echo-topic), or load the model in transformers."
)


class LlamaCppModel(PreTrainedModel):
    """A GGUF file in llama.cpp, in place of a transformers model.

    The last hidden states are those of llama.cpp's last layer after the file's norm, which runs here: so a method can
    end after any layer, with or without the norm. Where an architecture ends in something else, they are llama.cpp's,
    and no layer can be read.

    Attributes:
        llama_cpp: The loaded file.
        layers: A placeholder for each layer; none where layers cannot be read.
        norm: Final norm; None where llama.cpp runs it.
    """

    config_class = LlamaCppConfig
    config: LlamaCppConfig
    language_model_class = RemoteModel
    layers: nn.ModuleList
    norm: nn.Module | None
    _supports_sdpa = True

    def __init__(self, config: LlamaCppConfig, llama_cpp: LlamaCpp) -> None:
        super().__init__(config)
        self.llama_cpp = llama_cpp
        self.norm = _norm(llama_cpp)
        self.layers = nn.ModuleList(nn.Identity() for _ in range(config.num_hidden_layers if self.norm else 0))
        # A model's device and precision are those of its parameters.
        self.place = nn.Parameter(torch.zeros(0), requires_grad=False)

    def token_states(self, rows: Sequence[list[int]], layers: Sequence[int]) -> dict[int, Tensor]:
        """Return the states after some layers, counted from 1, each (B, N, D), with zeros for padding.

        0 is the input of the first layer, and :data:`END` the last hidden states.
        """
        found = [self.llama_cpp.states(row, layers) for row in rows]
        padded = {layer: [torch.from_numpy(states[layer]) for states in found] for layer in layers}
        return {layer: pad_sequence(states, batch_first=True).to(self.device) for layer, states in padded.items()}

    def get_input_embeddings(self) -> nn.Module:
        """Return what gives the input of the first layer."""
        return LlamaCppEmbeddings(self)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, name: str, *, config: LlamaCppConfig, llama_cpp: LlamaCpp | None = None, **kwargs: Any
    ) -> Any:
        """Load the GGUF file in a configuration's folder, if it is the one that the configuration names.

        Args:
            name: Directory or Hub id.
            config: Its configuration, which transformers reads.
            llama_cpp: The file, if it is loaded.
            **kwargs: ``subfolder``, ``revision`` and so on, and ``output_loading_info``, whether to return a report on
                missing weights, too. None are. Others, for weights in transformers, are ignored.

        Raises:
            FileNotFoundError: If the file is not there.
            ValueError: If it is another one.
        """
        llama_cpp = llama_cpp or LlamaCpp(_checked_file(Files(name, kwargs), config))
        if not 1 <= config.num_hidden_layers <= llama_cpp.layers or config.vocab_size != llama_cpp.vocabulary_size:
            raise ValueError(
                f"{config.num_hidden_layers} layers and {config.vocab_size} tokens: {llama_cpp.file} has "
                f"{llama_cpp.layers} and {llama_cpp.vocabulary_size}. Build the model anew."
            )
        model = cls(config, llama_cpp).eval()
        report: dict[str, list[str]] = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
        return (model, report) if kwargs.get("output_loading_info") else model

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save the configuration, and the GGUF file as a hard link on the same disk, else as a copy."""
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


class LlamaCppEmbeddings(nn.Module):
    """Input embeddings in llama.cpp. ``weight`` has as many rows as there are token ids, and takes no memory."""

    def __init__(self, model: LlamaCppModel) -> None:
        super().__init__()
        self.weight = torch.zeros(1, 1).expand(model.config.vocab_size, 1)
        # A method, not the model: its embeddings would have it as a child.
        self._token_states = model.token_states

    def forward(self, input_ids: Tensor) -> Tensor:
        rows = input_ids.reshape(-1, input_ids.shape[-1]).tolist()
        return self._token_states(rows, [0])[0].view(*input_ids.shape, -1)


def _is_saved(files: Files) -> bool:
    """Return whether a configuration is of a model that llama.cpp runs."""
    path = files.find("config.json")
    return path is not None and read_object(path).get("model_type") == MODEL_TYPE


def _checked_file(files: Files, config: LlamaCppConfig) -> Path:
    """Return the GGUF file that a configuration names, in its folder."""
    if not re.fullmatch(r"[^/\\]+\.gguf", str(config.file)):
        raise ValueError(f"file={config.file!r}: give the name of a GGUF file in the folder of config.json.")
    file = files.find(config.file)
    if file is None:
        raise FileNotFoundError(
            f"{files.name} has no {config.file}, the GGUF file that the model runs on: get the whole model, or copy "
            f"the file of {config.size} bytes with SHA-256 {config.sha256} there."
        )
    if file.stat().st_size != config.size or gguf.digest_of(file) != config.sha256:
        raise ValueError(
            f"{file} is not the file that the model was saved with ({config.size} bytes, SHA-256 {config.sha256}): its "
            "embeddings would be others. Get that file, or build the model anew."
        )
    return file


def _norm(model: LlamaCpp) -> nn.Module | None:
    """Return the norm in a GGUF file that gives last hidden states from those of the last layer; None if none does."""
    weights, epsilon = model.final_norm()
    try:
        found = model.states([0, 1, 2, 3], [0, model.layers, END])
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
    r"""Word i is the last hidden state :math:`v_i` of token i, from a GGUF file that llama.cpp runs.

    Other methods take the module in place of a loaded ``Transformer``, if they read states as they are::

        language_model = LlamaCppTransformer("model.gguf")
        model = st_reba.build(language_model, "echo-topic", texts=texts)
        print(language_model.generate([{"role": "user", "content": "What is the capital of France?"}]))

    A saved model contains the GGUF file, and is loaded like any other. Texts run one by one, so that an embedding does
    not depend on its batch.

    Args:
        model_name_or_path: Path of a GGUF file, or a name on the Hub (see :func:`st_reba.lm.gguf.as_directory`).
        **settings: As for :class:`CausalTransformer`.

    Raises:
        FileNotFoundError: If there is no such file.
        ImportError: If xllamacpp or gguf is not installed, or xllamacpp is of another release.
        ValueError: If llama.cpp cannot load the file.
    """

    def _directory(self, name: str, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        options = kwargs.get("model_kwargs") or {}
        if options.get("gguf_file") is None and not gguf.is_gguf(name):
            files = Files(name, options)
            # A saved model, which contains its file.
            if _is_saved(files) or _is_saved(files.of_base(name, options.get("revision"))):
                return name, kwargs
            raise ValueError(f"{name} is not a GGUF file, and llama.cpp runs no other. Use CausalTransformer.")
        file = gguf.located(name, options)
        if _PART.search(file.name):
            raise ValueError(f"{file} is one part of several: merge them first, `llama-gguf-split --merge`.")
        digest = gguf.digest_of(file)
        llama_cpp = LlamaCpp(file)
        config = LlamaCppConfig(
            # Files of Ollama have no suffix.
            file=file.with_suffix(gguf.SUFFIX).name, sha256=digest, size=file.stat().st_size,
            hidden_size=llama_cpp.hidden_size, num_hidden_layers=llama_cpp.layers,
            vocab_size=llama_cpp.vocabulary_size, max_position_embeddings=llama_cpp.positions,
            architectures=["LlamaCppModel"],
        )  # fmt: skip
        directory = gguf.kept(file, digest, [MODEL_TYPE], lambda source: config)
        return str(directory), {**kwargs, "model_kwargs": {"llama_cpp": llama_cpp}}

    def generate(self, prompt: str | Sequence[Mapping[str, str]], *, max_new_tokens: int = 256, **kwargs: Any) -> str:
        """Continue a text, or answer a chat; also while another thread embeds.

        Args:
            prompt: A text; or messages, ``{"role": ..., "content": ...}``, for the model's chat template.
            max_new_tokens: Largest number of tokens.
            **kwargs: ``temperature``, ``top_p`` and ``seed``: see :meth:`st_reba.lm.llama_cpp.LlamaCpp.generate`.

        Returns:
            The new text, without special tokens.

        Raises:
            ValueError: If there is no room for it, or messages are given and the file has no chat template.
        """
        tokenizer: Any = self.tokenizer
        if isinstance(prompt, str):
            ids = tokenizer(prompt)["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        new = cast(LlamaCppModel, self.model).llama_cpp.generate(ids, max_new_tokens, **kwargs)
        return str(tokenizer.decode(list(new), skip_special_tokens=True))


AutoModel.register(LlamaCppConfig, LlamaCppModel)
AutoConfig.register(MODEL_TYPE, LlamaCppConfig)
