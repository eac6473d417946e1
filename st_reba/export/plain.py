"""A recipe as a plain sentence-transformers directory, for inference engines, which know none of our modules.

What stands around a text, and that it stands several times, goes into the tokenizer: ``tokenizer.json`` adds fixed
tokens before, between and behind copies of the text, after it was truncated, and every engine reads it.
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

from ..modules import CausalModule, CausalTransformer, EchoModule

#: The names that all versions of ST read, and engines look for.
_MODULES = "sentence_transformers.models"
_POOLINGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")

# Texts that a finished directory is tried on: the last ones are longer than most limits.
_PROBES = ["a", "Who said so?", 'He said "no"', "我爱自然语言处理。", "我爱你", "Zwölf Boxkämpfer 🥊 "]
_LONG_PROBE = "a b c " * 700
# Cosine distance to what is exported, above which it is not the same; half precision rounds.
_SAME = {torch.float32: 1e-5}
_SAME_IN_HALF = 1e-2


def save_plain(model: SentenceTransformer, directory: Path, *, pieces: bool = False) -> None:
    """Write a model as a plain SentenceTransformer, which gives the same vectors without st_reba.

    These can be: the classical embedding and Echo, in any template, read at the last token (or, where every token of
    the input is read, as a mean), with an early exit. What is written is loaded and compared before this returns.

    Args:
        model: Whose first module is one of st_reba's.
        directory: An empty one.
        pieces: Tokenise a template and its text apart, and leave the text as it is, as an engine does; the vectors are
            then those of ``tokenization="pieces"`` and ``normalize_text=False``.

    Raises:
        ValueError: If an engine cannot carry the recipe, with the reason; or if the written model gives other vectors.
    """
    module = _checked(model, pieces)
    if pieces:
        module = copy.copy(module)
        module.tokenization, module.normalize_text = "pieces", False
    module.model.save_pretrained(directory)
    _name_as_before(directory / "config.json", _older_rotation(module.model.config))
    # What stands behind the last copy and is not read is nothing to a causal model.
    tokenizer = _tokenizer(module, to_the_end=module.pool_over != "text" or model[1].pooling_mode == "mean")
    tokenizer.save_pretrained(directory)
    _name_as_before(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    _write_pipeline(model, directory, tokenizer.model_max_length if module.max_seq_length else None)
    _compare(model, module, directory)


def _checked(model: SentenceTransformer, pieces: bool) -> CausalModule:
    """The first module of a model that engines can carry.

    Raises:
        ValueError: If they cannot, with the reason.
    """
    module, *behind = model.children()
    name = type(module).__name__
    if not isinstance(module, CausalModule):
        raise ValueError(f"The model's first module is {name}, none of st_reba's: it is plain as it is.")
    pooling = behind[0] if behind else None
    mode = getattr(pooling, "pooling_mode", "")
    mode = mode if isinstance(mode, str) else "+".join(mode)
    others = [*map(str, module.changes)]
    literal = any(module._template.literals)
    prompts = sorted(key for key, prompt in model.prompts.items() if prompt)
    refusals = [
        (
            type(module) not in (CausalTransformer, EchoModule),
            f"{name} does more than one causal pass read as it is, which no engine runs: serve it with st_reba. "
            "CausalTransformer and EchoModule can be exported.",
        ),
        (others, f"An engine runs the language model unchanged, and here it has {', '.join(others)}."),
        (
            not isinstance(pooling, Pooling) or any(not isinstance(part, Normalize) for part in behind[1:]),
            f"Behind {name} stand {', '.join(type(part).__name__ for part in behind)}: an engine runs Pooling and "
            "Normalize alone, in this order.",
        ),
        (
            mode not in ("lasttoken", "mean") or (mode == "mean" and not _reads_all(module)),
            f'Pooling("{mode}") over the tokens of {name} with pool_over="{module.pool_over}": an engine pools every '
            'token of the input or the last. Build it with Pooling("lasttoken").',
        ),
        (
            not module.final_norm,
            "final_norm=False: an engine runs the norm behind the last layer. Use final_norm=True.",
        ),
        (
            module.copies > 2,
            f"repetitions={module.copies}: of a long text that is cut, tokenizers keeps every combination of the "
            "parts of all copies, which takes minutes. Two copies can be exported.",
        ),
        (
            not getattr(module.tokenizer, "is_fast", False),
            f"{type(module.tokenizer).__name__} has no tokenizer.json, which engines read.",
        ),
        (
            literal and module.tokenization == "whole" and not pieces,
            f"The template {str(module._template)!r} and a text are tokenised as one string, and an engine puts fixed "
            "tokens around a text. Export it with pieces (--pieces): its vectors are then those of a model built with "
            'tokenization="pieces".',
        ),
        (
            module.normalize_text and not pieces,
            "normalize_text=True: an engine leaves a text's marks as they are. Export it with pieces (--pieces): its "
            "vectors are then those of a model built with normalize_text=False.",
        ),
        (
            module._template.takes_prompt,
            f"The template {str(module._template)!r} has the prompt behind or within its words, and an engine puts "
            "fixed tokens around a text. Export one model for each prompt, which has its words in the template.",
        ),
        (
            prompts and (literal or module.copies > 1 or module.tokenization == "pieces"),
            f"The model has the prompts {prompts}, and its template stands behind them, where an engine puts it in "
            "front. Leave the prompts out (model.prompts = {}), or the template.",
        ),
        (
            model.prompts.get(model.default_prompt_name or ""),
            f'The prompt "{model.default_prompt_name}" is the default, and engines put none before a text unasked. Set '
            "model.default_prompt_name = None, and let clients ask for it.",
        ),
    ]
    for refused, sentence in refusals:
        if refused:
            raise ValueError(sentence)
    return module


def _reads_all(module: CausalModule) -> bool:
    """Whether every token of the input is handed on."""
    if module.copies > 1:
        return False
    frame = module.frames()[0]
    around = [*module._template.literals, *frame.before, *frame.after]
    reads_from_the_text = module.pool_over == "all" and not module._template.literals[0]
    return module.pool_over == "whole" or reads_from_the_text or not any(around)


# The tokenizer


def _tokenizer(module: CausalModule, to_the_end: bool) -> PreTrainedTokenizerFast:
    """Adds what stands around a text, between its copies and behind them, and truncates one copy as the module does."""
    given: Any = module.tokenizer
    frame = module.frames()[0]
    parts = [[*frame.before, *frame.literals[0]], *frame.literals[1:]]
    parts[-1] = [*parts[-1], *frame.after] if to_the_end else []
    around = [[token for token, _ in part] for part in parts]
    backend = Tokenizer.from_str(given.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = _around(around, given)
    added = sum(map(len, around))
    limit = module.max_seq_length
    special = {name: str(token) for name, token in given.special_tokens_map.items() if isinstance(token, str)}
    # Padding is on the right and never read, so any token will do.
    special.setdefault("pad_token", special.get("eos_token") or given.convert_ids_to_tokens(0))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        padding_side="right",
        truncation_side=given.truncation_side,
        **({} if limit is None else {"model_max_length": limit + added}),
        **special,
    )


def _around(around: list[list[int]], tokenizer: Any) -> processors.TemplateProcessing:
    """Copies of the text, with these tokens before the first, between them, and behind the last."""
    names = [f"<around-{place}>" for place in range(len(around))]
    added = {name: ids for name, ids in zip(names, around, strict=True) if ids}
    known = [{"id": name, "ids": ids, "tokens": tokenizer.convert_ids_to_tokens(ids)} for name, ids in added.items()]
    pieces = [piece for name in names[:-1] for piece in (name, "$A")] + [names[-1]]
    return processors.TemplateProcessing(
        single=[piece for piece in pieces if piece == "$A" or piece in added], special_tokens=known
    )


# The pipeline


def _write_pipeline(model: SentenceTransformer, directory: Path, limit: int | None) -> None:
    """What ST, vLLM and TEI read beside backbone and tokenizer, in the names that each of them knows."""
    parts = ["Transformer", *(type(part).__name__ for part in list(model.children())[1:])]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{part}" if i else "", "type": f"{_MODULES}.{part}"}
        for i, part in enumerate(parts)
    ]
    pooling = cast(Pooling, model[1])
    mode = {"mean": "mean_tokens"}.get(str(pooling.pooling_mode), pooling.pooling_mode)
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


def _older_rotation(config: PreTrainedConfig) -> dict[str, Any]:
    """The rotary settings under the names of transformers 4, which without them takes its defaults and says nothing."""
    given = getattr(config, "rope_parameters", None) or {}
    by_layer = given if "full_attention" in given else {"full_attention": given}
    whole, local = by_layer["full_attention"], by_layer.get("sliding_attention", {})
    scaling = {name: value for name, value in whole.items() if name not in ("rope_theta", "partial_rotary_factor")}
    found = {
        "rope_theta": whole.get("rope_theta"),
        "partial_rotary_factor": whole.get("partial_rotary_factor"),
        "rope_local_base_freq": local.get("rope_theta"),
        "rope_scaling": scaling if scaling.get("rope_type", "default") != "default" else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _name_as_before(file: Path, more: dict[str, Any]) -> None:
    """Put settings into a file that transformers has written."""
    written = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(written | more, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _compare(model: SentenceTransformer, module: CausalModule, directory: Path) -> None:
    """See that what was written gives the same vectors.

    Raises:
        ValueError: If it does not.
    """
    ours = SentenceTransformer(modules=[module, *list(model.children())[1:]], device=str(model.device))
    dtype = module.model.dtype
    plain = SentenceTransformer(str(directory), device=str(model.device), model_kwargs={"dtype": dtype})
    # The long text is not in the batch of the others, which would be padded to its length.
    first, second = (
        torch.from_numpy(np.concatenate([each.encode(_PROBES), each.encode([_LONG_PROBE])])).double()
        for each in (ours, plain)
    )
    furthest = float((1 - torch.cosine_similarity(first, second)).max())
    if not furthest <= _SAME.get(dtype, _SAME_IN_HALF) or not np.isfinite(furthest):
        raise ValueError(
            f"The exported model gives other vectors than the model itself (cosine distance {furthest:.1g} at most): "
            f"the tokenizer or {type(module.model).__name__} does something that a plain directory does not carry."
        )
