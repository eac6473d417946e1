"""Cost of recipes: time and memory beside each other, and beside plain sentence-transformers.

    python benchmarks/cost.py --table recipes --model FILE --name SmolLM2-135M-Instruct --dtype bfloat16
    python benchmarks/cost.py --table repetition --batch 8               # ReBA beside Echo; half an hour on one core
    python benchmarks/cost.py --table plain                              # texts of mixed lengths
    python benchmarks/cost.py --table alone                              # deterministic=True, by length
    python benchmarks/cost.py --table repetition --device cuda --dtype bfloat16 --sizes 1b 7b --lengths 128 512

All contenders take turns in one run, and a ratio is the median of each round's ratio. All tables but "recipes" have
random weights; peak memory is measured in a process for each contender, and on a GPU, whose
memory PyTorch counts, in the same one. "recipes" reads the package's sentences. Rows are added to results/cost.csv.
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModel, LlamaConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from records import DEMO_MODEL, Record
from runs import add_costs, contender, encoding, interleaved, megabytes, options, parser, pooled, ratio, timed
from runs import alone as in_its_own_process
from st_reba import CausalTransformer
from st_reba.compare.cost import TIMED_TEXTS, timed_batch
from st_reba.data.demo import demo_sentences
from st_reba.modules.vectors import TokenVectors
from st_reba.recipes import default_recipes
from st_reba.text.layout import Layout

WORDS, POSITIONS = 1000, 8192
SIZES = {
    # name: layers, heads, width, width of the MLP
    "small": (12, 8, 512, 1376),
    "base": (12, 12, 768, 2048),
    "1b": (22, 32, 2048, 5632),
    "7b": (32, 32, 4096, 11008),
}
#: (contender, unit) of each ratio of the table "repetition".
RATIOS = (
    ("Echo-2, last", "Classical, last"),
    ("ReBA-2, last", "Echo-2, last"),
    ("ReBA-2, mean", "Echo-2, mean"),
    ("ReBA-2 with all maps stored, mean", "ReBA-2, mean"),
)
STORED = "ReBA-2 with all maps stored"
CLASSICAL, PLAIN = "Classical, mean", "sentence-transformers, mean"
ALONE = "Classical, mean, each text alone"
MIXED = (CLASSICAL, ALONE, "Classical, last", "Echo-2, mean", "Echo-2, last", "ReBA-2, mean", "ReBA-2, last")
SHORTEST, LONGEST = 5, 400
#: Most texts of a batch, and of the table "alone" most tokens.
BATCH, TOKENS = 32, 2048


class PaperReBA(CausalTransformer):
    """ReBA-2 as the paper writes it: every map is stored, then symmetrised and fused (Algorithm 1).

    For texts of one length, so that nothing needs to be masked.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, template="{text}", **kwargs)
        self.model.set_attn_implementation("eager")

    def parts(self, layouts: Sequence[Layout]) -> list[Tensor]:
        return [torch.arange(len(layouts[0].input_ids))]

    def read(self, layout: Layout) -> TokenVectors:
        n = layout.input_ids.shape[1]
        output = self.model(input_ids=layout.input_ids.repeat(1, 2).to(self.model.device), output_attentions=True)
        fused = torch.zeros_like(output.attentions[0][:, 0])
        for layer in output.attentions:
            for attention in layer.unbind(1):
                fused = torch.maximum(fused, (attention + attention.mT) / 2)
        words = fused[:, :n].triu() @ output.last_hidden_state
        return TokenVectors(words, layout.attention_mask.to(words.device), layout.input_ids.to(words.device))


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
def loaded(path: str, dtype: str, device: str, stores_maps: bool) -> CausalTransformer:
    """Load the weights that contenders share; those that store maps change how the model attends."""
    return CausalTransformer(path, model_kwargs={"dtype": dtype}).to(device)


def load(name: str, path: str, dtype: str, device: str = "cpu") -> SentenceTransformer:
    """Load a contender."""
    if name == PLAIN:
        module = Transformer(path, model_kwargs={"dtype": dtype})
        tokenizer = cast(PreTrainedTokenizerBase, module.tokenizer)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension(), "mean")], device=device)
    recipe, _, pooling = name.rpartition(", ")
    if recipe == STORED:
        return pooled(PaperReBA(loaded(path, dtype, device, True)), pooling)
    backbone = loaded(path, dtype, device, False)
    return contender(CLASSICAL, backbone, deterministic=True) if name == ALONE else contender(name, backbone)


def texts(length: int, count: int, seed: int = 0) -> list[str]:
    """Draw texts of so many tokens of a model with random weights."""
    draw = random.Random(f"{length} {seed}")
    return [" ".join(f"w{draw.randrange(1, WORDS)}" for _ in range(length)) for _ in range(count)]


def memory_on_gpu(model: SentenceTransformer, inputs: list[str]) -> dict[str, float]:
    """Return the peak bytes of encoding one batch, above what is loaded."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    encoding(model, len(inputs))(inputs)
    return {"peak memory of encoding": torch.cuda.max_memory_allocated() - before}


def memory_alone(name: str, path: str, inputs: list[str], given: argparse.Namespace) -> dict[str, float]:
    """Return the peak megabytes of a process that does nothing but encode one batch."""
    torch.set_num_threads(given.threads)
    encode = encoding(load(name, path, given.dtype), len(inputs))
    encode(texts(4, 1))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
    encode(inputs)
    return {"peak memory of the process": megabytes("VmHWM:")}


def rows(
    ratios: Sequence[tuple[str, str]],
    spent: Mapping[str, Sequence[float]],
    used: Mapping[str, Mapping[str, float]],
    how: tuple[str, str],
) -> Iterator[Record]:
    """Yield the ratios of time and memory.

    Args:
        ratios: (contender, unit).
        spent: Seconds of every round of every contender.
        used: Peak memory of each contender, by kind; empty if it was not measured.
        how: How time was measured, and memory.
    """
    for name, unit in ratios:
        row: Record = {"contender": name, "unit": unit}
        yield {**row, "quantity": "time", "value": ratio(spent[name], spent[unit])["value"], "how": how[0]}
        for quantity, value in used.get(name, {}).items():
            yield {**row, "quantity": quantity, "value": round(value / used[unit][quantity], 4), "how": how[1]}


def repetition(path: str, given: argparse.Namespace) -> Iterator[Record]:
    """Yield the time and the memory of repetition, by length."""
    on_gpu = given.device != "cpu"
    clock = "times by the clock" if on_gpu else "times of the processor"
    apart = "memory that PyTorch counted, once" if on_gpu else "memory in a process of its own, once"
    how = f"{clock}, median of {given.rounds} interleaved rounds", apart
    names = dict.fromkeys(name for pair in RATIOS for name in pair)
    contenders = {name: load(name, path, given.dtype, given.device) for name in names}
    for length in given.lengths:
        inputs = texts(length, given.batch)
        runs = {name: timed(encoding(model, given.batch), given.device) for name, model in contenders.items()}
        # The first round warms up.
        spent = {name: own[1:] for name, own in interleaved(runs, [inputs] * (given.rounds + 1)).items()}
        used = {}
        for name, model in contenders.items():
            if on_gpu:
                used[name] = memory_on_gpu(model, inputs)
            else:
                used[name] = in_its_own_process(memory_alone, name, path, inputs, given)
        for row in rows(RATIOS, spent, used, how):
            yield {**row, "tokens": length, "batch": given.batch}


def recipes(path: str, given: argparse.Namespace) -> Iterator[Record]:
    """Yield each recipe's time over the classical embedding's, each run alone, as a user would run it."""
    backbone, runs = CausalTransformer(path, model_kwargs={"dtype": given.dtype}).eval(), {}
    for recipe in (each for each in default_recipes(3) if each.post_processor == each.row.post_processor):
        try:
            model = recipe.model(backbone, filtered=False)
        except ValueError as error:
            print(f"{recipe.name} is left out: {error}")
            continue
        runs[f"{recipe.row.name}, {recipe.pooling}"] = timed(encoding(model, given.batch))
    batches = [timed_batch(demo_sentences("en"), min(given.batch, TIMED_TEXTS))]
    for run in runs.values():
        run(batches[-1][:2])
    found = interleaved(runs, batches * given.rounds)
    spent = {name: sum(min(own[place :: len(batches)]) for place in range(len(batches))) for name, own in found.items()}
    how = f"{sum(map(len, batches))} sentences, times of the processor, the fastest of {given.rounds} rounds in turn"
    for name in (each for each in spent if each != CLASSICAL):
        value = round(spent[name] / spent[CLASSICAL], 3)
        row: Record = {"quantity": "time", "contender": name, "unit": CLASSICAL, "how": how, "batch": given.batch}
        yield {**row, "value": value}


def mixed(path: str, given: argparse.Namespace) -> Iterator[Record]:
    """Yield times on texts of mixed lengths, in the batches that ``encode`` makes of all of them."""
    draw = random.Random(0)
    lengths = sorted((SHORTEST * (LONGEST / SHORTEST) ** draw.random() for _ in range(given.texts)), reverse=True)
    ordered = [texts(round(length), 1, seed)[0] for seed, length in enumerate(lengths)]
    batches = [ordered[first : first + BATCH] for first in range(0, len(ordered), BATCH)]
    parts = [[text for own in batches[part :: given.rounds] for text in own] for part in range(given.rounds)]
    contenders = {name: encoding(load(name, path, given.dtype), BATCH) for name in (PLAIN, *MIXED)}
    what = f"{given.texts} texts of {SHORTEST} to {LONGEST} tokens"
    return in_turn(contenders, PLAIN, parts, what, BATCH)


def alone(path: str, given: argparse.Namespace) -> Iterator[Record]:
    """Yield the time of each text alone beside batches, by length."""
    contenders = {name: load(name, path, given.dtype) for name in (ALONE, CLASSICAL)}
    for length in given.lengths:
        batch = max(1, min(BATCH, TOKENS // length))
        runs = {name: encoding(model, batch) for name, model in contenders.items()}
        drawn = [texts(length, batch)] * given.rounds
        for row in in_turn(runs, CLASSICAL, drawn, "texts of equal length", batch):
            yield {**row, "tokens": length}


def in_turn(
    contenders: Mapping[str, Callable[[Sequence[str]], object]], unit: str, parts: Sequence[Sequence[str]], what: str,
    batch: int,
) -> Iterator[Record]:  # fmt: skip
    """Yield the time of each contender over that of one of them."""
    for run in contenders.values():
        run(parts[0][:8])
    spent = interleaved({name: timed(run) for name, run in contenders.items()}, parts)
    how = f"{what}, times of the processor, medians of {len(parts)} interleaved rounds"
    for name in (each for each in contenders if each != unit):
        row: Record = {"quantity": "time", "contender": name, "unit": unit, "how": how, "batch": batch}
        yield row | ratio(spent[name], spent[unit])


MEASURES = {"recipes": recipes, "repetition": repetition, "plain": mixed, "alone": alone}


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, data=False, threads=1)
    made.add_argument("--table", choices=MEASURES, default="repetition")
    made.add_argument("--model", default=str(DEMO_MODEL), help="for the recipes: a directory or a GGUF file")
    made.add_argument("--name", default="demo LM", help="its name in tables")
    made.add_argument("--sizes", nargs="+", choices=SIZES, default=["small"], help="of random models")
    made.add_argument("--lengths", nargs="+", type=int, default=[32, 128, 512], help="tokens of one copy")
    made.add_argument("--batch", type=int, default=8, help="texts at a time")
    made.add_argument("--texts", type=int, default=2000, help="of mixed lengths")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--device", default="cpu")
    made.add_argument("--dtype", default="float32")
    given = options(made, arguments)
    with tempfile.TemporaryDirectory() as directory:
        named_models = {given.name: given.model}
        if given.table != "recipes":
            named_models = {
                named(size): str(make_backbone(size, Path(directory), given.dtype, given.device))
                for size in given.sizes
            }
        for name, path in named_models.items():
            found = MEASURES[given.table](path, given)
            add_costs(found, given, given.device, table=given.table, model=name, precision=given.dtype)


if __name__ == "__main__":
    main()
