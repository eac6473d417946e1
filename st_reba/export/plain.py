"""Export of a recipe as a plain sentence-transformers directory, for inference engines that lack our modules.

Templates and repetitions go into the tokenizer, which every engine runs: ``tokenizer.json`` truncates a text, and then
adds fixed tokens before, between and after its copies.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from sentence_transformers import SentenceTransformer, __version__
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import Tokenizer, processors
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from ..hub.loading import modes_of
from ..lm.llama_cpp import MODEL_TYPE
from ..modules import CausalModule, CausalTransformer, EchoModule

#: Names that all versions of ST, and engines, read.
_MODULES = "sentence_transformers.models"
_POOLINGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")

# Texts to compare vectors on, one of which is longer than most limits.
_PROBES = ["a", "Who said so?", 'He said "no"', "我爱自然语言处理。", "我爱你", "Zwölf Boxkämpfer 🥊 "]
_LONG_PROBE = "a b c " * 700


def save_plain(model: SentenceTransformer, directory: Path, *, pieces: bool = False) -> None:
    """Write a model as a plain SentenceTransformer, which gives the same vectors without st_reba.

    Classical embeddings and Echo can be exported, with any template and with an early exit, if they pool the last
    token or every token of the input. The written model is loaded and its vectors are compared.

    Args:
        model: Model whose first module is one of st_reba.
        directory: Empty directory.
        pieces: Whether to tokenize template and text separately and not to normalize the text, as engines do. The
            vectors are then those of ``tokenization="pieces"`` and ``normalize_text=False``.

    Raises:
        ValueError: If an engine cannot run the recipe, or the written model gives other vectors.
    """
    module = _checked(model, pieces)
    if pieces:
        module = copy.copy(module)
        module.tokenization, module.normalize_text = "pieces", False
    module.model.save_pretrained(directory)
    _update_json(directory / "config.json", _rope_of_transformers_4(module.model.config))
    # A causal model does not need the tokens after the last one that is pooled.
    tokenizer = _tokenizer(module, to_the_end=module.pool_over != "text" or model[1].pooling_mode == "mean")
    tokenizer.save_pretrained(directory)
    _update_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    _write_pipeline(model, directory, tokenizer.model_max_length if module.max_seq_length else None)
    _compare(model, module, directory)


def _checked(model: SentenceTransformer, pieces: bool) -> CausalModule:
    """Return the first module of a model that engines can run.

    Raises:
        ValueError: If engines cannot run the model.
    """
    module, *following = model.children()
    name = type(module).__name__
    if not isinstance(module, CausalModule):
        raise ValueError(f"The model's first module is {name}, which engines can run without an export.")
    if module.model.config.model_type == MODEL_TYPE:
        raise ValueError(f"{name} runs on llama.cpp. Build it on the model in transformers, and export that.")
    if type(module) not in (CausalTransformer, EchoModule):
        problem = f"{name} does more than one causal pass, which no engine runs."
        raise ValueError(f"{problem} Serve it with st_reba, or export a CausalTransformer or an EchoModule.")
    if module.bidirectional_layers or not module.final_norm or hasattr(module.model, "peft_config"):
        problem = "An engine runs the language model unchanged:"
        raise ValueError(f"{problem} use bidirectional_layers=0 and final_norm=True, and merge an adapter first.")
    kinds = [type(part) for part in following]
    if kinds not in ([Pooling], [Pooling, Normalize]):
        problem = f"{name} is followed by {', '.join(kind.__name__ for kind in kinds) or 'nothing'}:"
        raise ValueError(f"{problem} an engine runs only Pooling and Normalize, in this order.")
    mode = "+".join(sorted(modes_of(cast(Pooling, model[1]))))
    prompts = sorted(key for key, prompt in model.prompts.items() if prompt)
    if mode not in ("lasttoken", "mean") or (mode == "mean" and not _pools_all(module, bool(prompts))):
        problem = f'Pooling("{mode}") over the tokens of {name} with pool_over="{module.pool_over}":'
        advice = 'an engine pools every token, of prompts too, or the last. Build it with Pooling("lasttoken").'
        raise ValueError(f"{problem} {advice}")
    template = module.layouter.templates[0]
    literal = any(template.literals)
    if template.copies > 2:
        raise ValueError(
            f"repetitions={template.copies}: for a truncated text, tokenizers keeps every combination of the parts of "
            "all copies, which takes minutes. Two copies can be exported."
        )
    if not getattr(module.tokenizer, "is_fast", False):
        raise ValueError(f"{type(module.tokenizer).__name__} has no tokenizer.json, which engines read.")
    if not pieces and (module.normalize_text or (literal and module.tokenization == "whole")):
        raise ValueError(
            f"The template {module.template!r} and a text are tokenized as one string, or the text is normalized, and "
            "an engine adds fixed tokens to the text as it is. Export with pieces (--pieces), which gives the vectors "
            'of tokenization="pieces" and normalize_text=False.'
        )
    if template.takes_prompt or (prompts and (literal or template.copies > 1 or module.tokenization == "pieces")):
        problem = f"An engine adds the template {module.template!r} before a prompt. Remove the prompts {prompts} "
        advice = "(model.prompts = {}), or export a model for each, with the prompt's words in its template."
        raise ValueError(problem + advice)
    if model.prompts.get(model.default_prompt_name or ""):
        problem = f'The prompt "{model.default_prompt_name}" is the default, and engines have no default prompt.'
        raise ValueError(f"{problem} Set model.default_prompt_name = None, and let clients ask for it.")
    return module


def _pools_all(module: CausalModule, has_prompts: bool) -> bool:
    """Return whether the pooling covers every token of the input, which may have a prompt."""
    layouter = module.layouter
    literals = layouter.templates[0].literals
    if len(literals) > 2:
        return False
    pools_from_the_text = module.pool_over == "all" and not literals[0]
    is_bare = not any([*literals, *layouter.before, *layouter.after])
    return module.pool_over == "whole" or (not has_prompts and (pools_from_the_text or is_bare))


# The tokenizer


def _tokenizer(module: CausalModule, to_the_end: bool) -> PreTrainedTokenizerFast:
    """Return a tokenizer that truncates a text as the module does, repeats it and adds the template's tokens."""
    original: Any = module.tokenizer
    layouter = module.layouter
    first, *others = ([token for token, _ in literal] for literal in layouter.frames()[0].literals)
    added = [[*layouter.before, *first], *others]
    added[-1] = [*added[-1], *layouter.after] if to_the_end else []
    backend = Tokenizer.from_str(original.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = _template_processing(added, original)
    tokens = original.special_tokens_map.items()
    settings: dict[str, Any] = {name: str(token) for name, token in tokens if isinstance(token, str)}
    # Any token can be the padding, which is on the right and masked.
    settings.setdefault("pad_token", settings.get("eos_token") or original.convert_ids_to_tokens(0))
    if module.max_seq_length is not None:
        settings["model_max_length"] = module.max_seq_length + sum(map(len, added))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, padding_side="right", truncation_side=original.truncation_side, **settings
    )


def _template_processing(added: list[list[int]], tokenizer: Any) -> processors.TemplateProcessing:
    """Return a post-processor that adds tokens before the first copy of a text, between copies and after the last."""
    pieces, special = [], []
    for number, ids in enumerate(added):
        if number > 0:
            pieces.append("$A")
        if ids:
            name = f"<around-{number}>"
            pieces.append(name)
            special.append({"id": name, "ids": ids, "tokens": tokenizer.convert_ids_to_tokens(ids)})
    return processors.TemplateProcessing(single=pieces, special_tokens=special)


# The pipeline


def _write_pipeline(model: SentenceTransformer, directory: Path, limit: int | None) -> None:
    """Write the pipeline's files in the names that ST, vLLM and TEI read."""
    parts = ["Transformer", *(type(part).__name__ for part in list(model.children())[1:])]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{part}" if i else "", "type": f"{_MODULES}.{part}"}
        for i, part in enumerate(parts)
    ]
    pooling = cast(Pooling, model[1])
    mode = "mean_tokens" if pooling.pooling_mode == "mean" else "lasttoken"
    settings = {
        "modules.json": modules,
        "config_sentence_transformers.json": {
            "__version__": {"sentence_transformers": __version__},
            "prompts": model.prompts,
            "default_prompt_name": None,
            "similarity_fn_name": model.similarity_fn_name,
        },
        "1_Pooling/config.json": {
            "word_embedding_dimension": pooling.get_embedding_dimension(),
            **{f"pooling_mode_{name}": name == mode for name in _POOLINGS},
            "include_prompt": True,
        },
    }
    if limit is not None:
        settings["sentence_bert_config.json"] = {"max_seq_length": limit, "do_lower_case": False}
    for part in modules[1:]:
        (directory / str(part["path"])).mkdir()
    for name, content in settings.items():
        (directory / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def _rope_of_transformers_4(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the rotary settings in the names of transformers 4, which otherwise uses its defaults silently."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = rope if "full_attention" in rope else {"full_attention": rope}
    whole, local = by_layer["full_attention"], by_layer.get("sliding_attention", {})
    scaling = {name: value for name, value in whole.items() if name not in ("rope_theta", "partial_rotary_factor")}
    settings = {
        "rope_theta": whole.get("rope_theta"),
        "partial_rotary_factor": whole.get("partial_rotary_factor"),
        "rope_local_base_freq": local.get("rope_theta"),
        "rope_scaling": scaling if scaling.get("rope_type", "default") != "default" else None,
    }
    return {name: value for name, value in settings.items() if value is not None}


def _update_json(file: Path, settings: dict[str, Any]) -> None:
    """Add settings to a file written by transformers."""
    written = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(written | settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _compare(model: SentenceTransformer, module: CausalModule, directory: Path) -> None:
    """Check that the written model gives the same vectors.

    Raises:
        ValueError: If the vectors differ.
    """
    ours = SentenceTransformer(modules=[module, *list(model.children())[1:]], device=str(model.device))
    dtype = module.model.dtype
    plain = SentenceTransformer(str(directory), device=str(model.device), model_kwargs={"dtype": dtype})
    # Separately from the long text, to whose length the others would be padded.
    first, second = (
        torch.from_numpy(np.concatenate([encoder.encode(_PROBES), encoder.encode([_LONG_PROBE])])).double()
        for encoder in (ours, plain)
    )
    distance = float((1 - torch.cosine_similarity(first, second)).max())
    # Rounding in half precision causes some. A distance that is not a number is not allowed.
    if not distance <= (1e-5 if dtype == torch.float32 else 1e-2):
        raise ValueError(
            f"The exported model gives other vectors than the model itself (cosine distance up to {distance:.1g}): a "
            f"plain directory cannot express the tokenizer or {type(module.model).__name__}. Serve it with st_reba."
        )
