"""Tiny random language models, one per family of architectures, and tokenizers of different types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging import version
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

#: A small trained language model, English and Chinese, of 8.4M parameters: see its README.md.
DEMO_MODEL = Path(__file__).parent / "demo_lm"

VOCABULARY = 384
SIZE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
MLP = {"intermediate_size": 48}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
POSITIONS = 256

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**SIZE, **MLP, **GROUPED}),
    "qwen2": ("Qwen2Config", {**SIZE, **MLP, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", {**SIZE, **MLP, **GROUPED}),
    "mistral_window": ("MistralConfig", {**SIZE, **MLP, **GROUPED, "sliding_window": 7}),
    "gemma2_softcap": (
        "Gemma2Config",
        {**SIZE, **MLP, **GROUPED, "sliding_window": 7, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {**SIZE, **MLP, **GROUPED, "sliding_window": 7, "query_pre_attn_scalar": 8,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gpt2": ("GPT2Config", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4,
                            "n_positions": POSITIONS}),
    "gpt_neox": ("GPTNeoXConfig", {**SIZE, **MLP}),
    "phi3": ("Phi3Config", {**SIZE, **MLP, "num_key_value_heads": 2}),
    "opt": ("OPTConfig", {**SIZE, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "mixtral_experts": ("MixtralConfig", {**SIZE, **MLP, **GROUPED, "num_local_experts": 4}),
    "qwen3_experts": (
        "Qwen3MoeConfig",
        {**SIZE, **MLP, **GROUPED, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "deepseek_latent": (
        "DeepseekV3Config",
        {**SIZE, **MLP, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
         "qk_nope_head_dim": 8, "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
         "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
    ),
    "gpt_oss_sinks": (
        "GptOssConfig",
        {**SIZE, **MLP, **GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "falcon": ("FalconConfig", {**SIZE, "alibi": False, "new_decoder_architecture": False, "multi_query": True}),
    "bloom": ("BloomConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "gpt_j": ("GPTJConfig", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4,
                             "n_positions": POSITIONS}),
    "gpt_neo": (
        "GPTNeoConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 3, "num_heads": 4, "window_size": 7,
         "attention_types": [[["global", "local", "global"], 1]], "max_position_embeddings": POSITIONS},
    ),
    "mpt": ("MptConfig", {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 3, "n_heads": 4,
                          "max_seq_len": POSITIONS}),
}  # fmt: skip

#: Those that compute attention in code of their own; GPT-J up to transformers 5.23.
OWN_ATTENTION: tuple[str, ...] = ("falcon", "bloom", "gpt_neo", "mpt")
if version.parse(transformers.__version__) < version.parse("5.24"):
    OWN_ATTENTION += ("gpt_j",)
ARCHITECTURES = tuple(CONFIGS)

#: For tests of one method: one like Llama, whose heads share keys; one with windows and a soft cap; one with learned
#: positions; and one with attention of its own. ``make test-long`` takes every architecture.
FEW = [
    name if name in ("llama", "gemma2_softcap", "gpt2", "bloom") else pytest.param(name, marks=pytest.mark.long)
    for name in ARCHITECTURES
]

TEXTS = [
    "I love natural language processing.",
    "我爱自然语言处理。",
    "The dog chased the cat; the cat chased the mouse, and nobody chased the dog.",
    "a",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich 🥊",
]

_SAMPLE = [
    *TEXTS,
    "他不喜欢苹果，但喜欢苹果手机。",
    "the quick brown fox jumps over the lazy dog",
    "bank bank river money",
]
_IN_PROMPTS = [f"{mark}{text[:3]}" for text in TEXTS for mark in ('"', " ", ": ") for _ in range(9)]


def tokenizer(kind: str = "bytes", **kwargs) -> PreTrainedTokenizerFast:
    """Return a tokenizer.

    ``bytes``: byte-level BPE without special tokens and pad token, with left padding. ``greedy``: the same with merges
    across words and punctuation, so that tokens cross the borders between prompt and text. ``bert``: WordPiece with
    [CLS] ... [SEP]. ``sentencepiece``: Unigram with word-boundary marks and a leading <s>.
    """
    if kind in ("bytes", "greedy"):
        greedy = kind == "greedy"
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not greedy)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY if greedy else 320, special_tokens=["<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        )  # fmt: skip
        inner.train_from_iterator([*_SAMPLE, *_IN_PROMPTS] if greedy else _SAMPLE, trainer)
        settings = {"padding_side": "left", "model_max_length": POSITIONS, **kwargs}
        return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", **settings)
    if kind == "bert":
        # WordPieceTrainer gives ids, and breaks ties, differently in every process.
        normalizer, splitter = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        words = [word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(" ".join(_SAMPLE)))]
        pieces = {piece for word in words for piece in (word, *word, *(f"##{letter}" for letter in word[1:]))}
        names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
        vocabulary = {piece: number for number, piece in enumerate([*names.values(), *sorted(pieces)])}
        inner = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        inner.normalizer, inner.pre_tokenizer = normalizer, splitter
        inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        return PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=POSITIONS, **{**names, **kwargs})
    inner = Tokenizer(models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    unigram = trainers.UnigramTrainer(vocab_size=320, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>",
                                      show_progress=False)  # fmt: skip
    inner.train_from_iterator(_SAMPLE, unigram)
    # Scores differ in the last digits, and equal ones in their order.
    found = json.loads(inner.to_str())["model"]["vocab"]
    scored = sorted(((piece, round(score, 2)) for piece, score in found[3:]), key=lambda pair: (-pair[1], pair[0]))
    inner.model = models.Unigram([*map(tuple, found[:3]), *scored], unk_id=0)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", model_max_length=POSITIONS
    )


def config(name: str, **more):
    config_class, settings = CONFIGS[name]
    kind = getattr(transformers, config_class)
    settings = {**IDS, **settings, **more}
    if "max_position_embeddings" in kind().to_dict() and "max_position_embeddings" not in settings:
        settings["max_position_embeddings"] = POSITIONS
    return kind(**settings)


def backbone(name: str, seed: int = 0, **settings):
    """Return a model with weights so large that attention is far from uniform."""
    torch.manual_seed(seed)
    return randomize(AutoModel.from_config(config(name, **settings)).eval().float())


def randomize(model):
    embeddings = {id(parameter) for module in model.modules() if isinstance(module, torch.nn.Embedding)
                  for parameter in module.parameters()}  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            else:
                spread = 1.0 if id(parameter) in embeddings else 1.5 * parameter.shape[-1] ** -0.5
                parameter.normal_(std=spread)
    return model


def save(model, directory: Path, kind: str = "bytes", **kwargs) -> str:
    model.save_pretrained(directory)
    tokenizer(kind, **kwargs).save_pretrained(directory)
    return str(directory)


#: For chat: each message in a line of its own, behind its role.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


def language_model(directory: Path, name: str = "llama", seed: int = 1, **settings):
    """Return a language model with its head, saved in a directory with a tokenizer."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config(name, **settings), attn_implementation="eager")
    made = randomize(made.eval().float())
    save(made, directory, model_max_length=settings.get("max_position_embeddings", POSITIONS))
    return made


def save_talking(directory: Path, name: str = "llama", tied: bool = True, **settings) -> str:
    """Save one that generates up to its limit, and a tokenizer with a chat template."""
    made = language_model(directory, name, 1 if tied else 2, tie_word_embeddings=tied, **settings)
    made.generation_config.eos_token_id = made.config.eos_token_id = None
    limit = settings.get("max_position_embeddings", POSITIONS)
    return save(made, directory, chat_template=CHAT_TEMPLATE, model_max_length=limit)


#: Encoders of BERT's build.
ENCODERS = {
    "bert": ("BertConfig", {"pad_token_id": 0}),
    "roberta": ("RobertaConfig", {"pad_token_id": 0, "type_vocab_size": 1}),
}


def encoder(name: str, seed: int = 0, **settings):
    """Return an encoder of four layers for :func:`tokenizer` ``"bert"``."""
    config_class, own = ENCODERS[name]
    sizes = {**SIZE, **MLP, "num_hidden_layers": 4, "max_position_embeddings": POSITIONS}
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**{**sizes, **own, **settings})
    return randomize(AutoModel.from_config(config).eval().float())


def own(model: Path) -> Path:
    """Return the folder of a saved model's first module, with its backbone and settings."""
    [found] = model.glob("0_*")
    return found
