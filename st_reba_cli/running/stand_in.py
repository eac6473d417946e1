"""A language model with random weights, made where no other is to be had: to see commands run, never for its scores."""

from __future__ import annotations

from pathlib import Path

import torch
from filelock import FileLock
from huggingface_hub import cached_assets_path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from st_reba.files import atomic_directory

#: Changes with what is made, so that an older one is not found any more.
_FORMAT = 1
_END = "<|end|>"
_SEED = 0


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
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # What the caller draws afterwards is what it would have drawn.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
