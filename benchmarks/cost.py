"""Cost of recipes: time and memory beside each other, and beside plain sentence-transformers.

    python benchmarks/cost.py --table recipes --model FILE --name SmolLM2-135M-Instruct --dtype bfloat16
    python benchmarks/cost.py --table repetition               # ReBA beside Echo, with memory; half an hour on one core
    python benchmarks/cost.py --table plain --batch 32                   # texts of mixed lengths
    python benchmarks/cost.py --table alone --lengths 12 32 128 512      # deterministic=True
    python benchmarks/cost.py --table repetition --device cuda --dtype bfloat16 --sizes 1b 7b --lengths 128 512

All contenders take turns in one run, and a ratio is the median of each round's ratio. Without ``--model``, models have
random weights. Peak memory is measured in a process for each contender. "recipes" reads the package's sentences. Rows
are added to results/cost.csv.
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import cast

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, LlamaConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from records import Record, machine, rewrite, today
from runs import alone, contender, encoding, interleaved, megabytes, options, parser, ratio, timed
from st_reba import CausalTransformer
from st_reba.compare.cost import TIMED_TEXTS, timed_batch
from st_reba.data.demo import demo_sentences
from st_reba.recipes import default_recipes

WORDS, POSITIONS = 1000, 8192
SIZES = {
    # name: layers, heads, width, width of the MLP
    "small": (12, 8, 512, 1376),
    "base": (12, 12, 768, 2048),
    "1b": (22, 32, 2048, 5632),
    "7b": (32, 32, 4096, 11008),
}
CLASSICAL, PLAIN = "Classical, mean", "sentence-transformers, mean"
DETERMINISTIC = "Classical, mean, each text alone"
MIXED = (CLASSICAL, DETERMINISTIC, "Classical, last", "Echo-2, mean", "Echo-2, last", "ReBA-2, mean", "ReBA-2, last")
SHORTEST, LONGEST = 5, 400
#: (contender, unit) of each ratio, by table.
RATIOS: Mapping[str, Sequence[tuple[str, str]]] = {
    "recipes": [
        (f"{each.row.name}, {each.pooling}", CLASSICAL)
        for each in default_recipes()
        if each.post_processor == each.row.post_processor
    ],
    "repetition": [
        ("Echo-2, last", "Classical, last"), ("ReBA-2, last", "Echo-2, last"), ("ReBA-2, mean", "Echo-2, mean"),
    ],
    "plain": [(name, PLAIN) for name in MIXED],
    "alone": [(DETERMINISTIC, CLASSICAL)],
}  # fmt: skip


def make_backbone(size: str, directory: Path, dtype: str, device: str = "cpu") -> Path:
    """Save a Llama with random weights, and a tokenizer with a token for each of ``WORDS`` words."""
    layers, heads, width, mlp = SIZES[size]
    path = directory / size
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
        max_position_embeddings=POSITIONS, bos_token_id=0, eos_token_id=0, pad_token_id=None, dtype=dtype,
    )  # fmt: skip
    with torch.device(device):
        AutoModel.from_config(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{word}": word for word in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w0", eos_token="w0", model_max_length=POSITIONS
    ).save_pretrained(path)
    return path


def named(size: str) -> str:
    """Return the name of such a model in tables."""
    layers, heads, width, _ = SIZES[size]
    return f"Llama, {layers} layers x {heads} heads, width {width}"


@cache
def loaded(path: str, dtype: str, device: str) -> CausalTransformer:
    """Load the weights that contenders share."""
    return CausalTransformer(path, model_kwargs={"dtype": dtype}).to(device)


def load(name: str, path: str, given: argparse.Namespace) -> SentenceTransformer:
    """Load a contender."""
    if name == PLAIN:
        module = Transformer(path, model_kwargs={"dtype": given.dtype})
        tokenizer = cast(PreTrainedTokenizerBase, module.tokenizer)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        pooling = Pooling(module.get_embedding_dimension(), "mean")
        return SentenceTransformer(modules=[module, pooling], device=given.device)
    backbone = loaded(path, given.dtype, given.device)
    return contender(CLASSICAL, backbone, deterministic=True) if name == DETERMINISTIC else contender(name, backbone)


def texts(length: int, count: int, seed: int = 0) -> list[str]:
    """Draw texts of so many tokens of a model with random weights."""
    draw = random.Random(f"{length} {seed}")
    return [" ".join(f"w{draw.randrange(1, WORDS)}" for _ in range(length)) for _ in range(count)]


def mixed(given: argparse.Namespace) -> list[list[str]]:
    """Draw texts of mixed lengths for each round, in the batches that ``encode`` makes of all of them."""
    draw = random.Random(0)
    lengths = sorted((SHORTEST * (LONGEST / SHORTEST) ** draw.random() for _ in range(given.texts)), reverse=True)
    ordered = [texts(round(length), 1, seed)[0] for seed, length in enumerate(lengths)]
    batches = [ordered[first : first + given.batch] for first in range(0, len(ordered), given.batch)]
    return [[text for own in batches[part :: given.rounds] for text in own] for part in range(given.rounds)]


def memory(name: str, path: str, inputs: list[str], given: argparse.Namespace) -> float:
    """Return the peak of a process that does nothing but encode one batch; on a GPU, above what is loaded."""
    torch.set_num_threads(given.threads)
    encode = encoding(load(name, path, given), len(inputs))
    encode(texts(4, 1))
    gc.collect()
    if given.device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
        encode(inputs)
        return megabytes("VmHWM:")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    encode(inputs)
    return torch.cuda.max_memory_allocated() - before


def measured(path: str, given: argparse.Namespace) -> Iterator[Record]:
    """Yield the ratios of a table: of time, and of repetition those of memory."""
    contenders: dict[str, SentenceTransformer] = {}
    for name in dict.fromkeys(name for pair in RATIOS[given.table] for name in pair):
        try:
            contenders[name] = load(name, path, given)
        except ValueError as error:
            print(f"{name} is left out: {error}")
    clock = "times of the processor" if given.device == "cpu" else "times by the clock"
    rows: Record = {"how": f"{clock}, median of {given.rounds} interleaved rounds", "batch": given.batch}
    for length in given.lengths if given.table in ("repetition", "alone") else [None]:
        if length is not None:
            rounds = [texts(length, given.batch)] * given.rounds
        elif given.table == "plain":
            rounds = mixed(given)
        else:
            rounds = [timed_batch(demo_sentences("en"), min(given.batch, TIMED_TEXTS))] * given.rounds
        runs = {name: timed(encoding(model, given.batch), given.device) for name, model in contenders.items()}
        # The first round warms up.
        spent = {name: own[1:] for name, own in interleaved(runs, [rounds[0], *rounds]).items()}
        for name, unit in RATIOS[given.table]:
            if name in spent and name != unit:
                row: Record = {**rows, "contender": name, "unit": unit, "tokens": length}
                yield {**row, "quantity": "time", **ratio(spent[name], spent[unit])}
                if given.table == "repetition":
                    ours, theirs = (alone(memory, each, path, rounds[0], given) for each in (name, unit))
                    what = "the process" if given.device == "cpu" else "encoding"
                    yield {**row, "quantity": f"peak memory of {what}", "value": round(ours / theirs, 4)}


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, data=False, threads=1)
    made.add_argument("--table", choices=RATIOS, default="repetition")
    made.add_argument("--model", help="a directory or a GGUF file; default: random models")
    made.add_argument("--name", help="its name in tables")
    made.add_argument("--sizes", nargs="+", choices=SIZES, default=["small"], help="of random models")
    made.add_argument("--lengths", nargs="+", type=int, default=[32, 128, 512], help="tokens of one copy")
    made.add_argument("--batch", type=int, default=8, help="texts at a time")
    made.add_argument("--texts", type=int, default=2000, help="of mixed lengths")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--device", default="cpu")
    made.add_argument("--dtype", default="float32")
    given = options(made, arguments)
    with tempfile.TemporaryDirectory() as directory:
        named_models = {given.name: given.model} if given.model else {
            named(size): str(make_backbone(size, Path(directory), given.dtype, given.device)) for size in given.sizes
        }  # fmt: skip
        for name, path in named_models.items():
            about = {"table": given.table, "model": name, "precision": given.dtype}
            about |= {"machine": machine(given.device, given.threads), **today()}
            for row in measured(path, given):
                rewrite("cost", [{**about, **row}], given.results)
                print(name, *(value for value in row.values() if value is not None), sep="; ", flush=True)


if __name__ == "__main__":
    main()
