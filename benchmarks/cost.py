"""What recipes cost: time and memory beside each other, beside plain sentence-transformers, and beside bare products.

    python benchmarks/cost.py --batch 8                                   # ReBA beside Echo; half an hour on one core
    python benchmarks/cost.py --sizes small --lengths 32 --rounds 3
    python benchmarks/cost.py --table sweep --sizes small --batch 8
    python benchmarks/cost.py --table chunked --sizes small --lengths 1024 2048 4096 --batch 1
    python benchmarks/cost.py --device cuda --dtype bfloat16 --sizes 1b 7b --lengths 128 512 --batch 8

All contenders take turns in one run and share one set of random weights; reported are medians over the rounds of each
round's ratios. Peak memory is measured in a process for each contender; of a GPU, whose memory PyTorch counts, in the
same one. Rows are added to results/cost.csv; ``make tables`` puts them where they are shown.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, LlamaConfig, PreTrainedTokenizerFast

from records import Record
from runs import add_costs, contender, interleaved, options, parser, pooled, ratio, timed
from st_reba import CausalTransformer, ReBAModule, RefinedThoughtModule
from st_reba.compare.sweep import RecipeSweep
from st_reba.modules.causal_module import CausalModule
from st_reba.modules.token_vectors import TokenVectors
from st_reba.text.layout import Layout

WORDS = 1000
POSITIONS = 8192
SIZES = {
    # name: layers, heads, width, width of the MLP
    "tiny": (2, 4, 128, 344),
    "small": (12, 8, 512, 1376),
    "base": (12, 12, 768, 2048),
    "1b": (22, 32, 2048, 5632),
    "7b": (32, 32, 4096, 11008),
}
#: By table, (contender, unit): the ratios that are reported. Contenders are called as they are in tables.
TABLES = {
    "repetition": (
        ("Echo-2, last", "Classical, last"),
        ("ReBA-2, last", "Echo-2, last"),
        ("ReBA-2, mean", "Echo-2, mean"),
        ("ReBA-2 with all maps stored, mean", "ReBA-2, mean"),
        ("ReBA-2 with all maps stored, one text at a time, mean", "ReBA-2, mean"),
    ),
    "passes": (
        ("RT-8, last", "RT-1, last"),
        ("RT-8 with whole passes, last", "RT-8, last"),
        ("Bidirectional, last", "Classical, last"),
    ),
    "sweep": (
        ("All recipes in one pass", "Echo-3, mean"),
        ("All recipes in one pass", "Classical, mean"),
        ("All recipes, one by one", "All recipes in one pass"),
    ),
    "chunked": (
        ("ReBA-2 in chunks of 128, mean", "Classical, mean"),
        ("ReBA-2 in chunks of 128, last", "Classical, last"),
        ("ReBA-2, mean", "Classical, mean"),
    ),
}


class WholePasses(RefinedThoughtModule):
    """RT as one would write it down: every pass over the whole text."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reuses_cache = False


class PaperReBA(CausalTransformer):
    """ReBA-2 as one would write it down from the paper: every map stored, then symmetrised and fused (Algorithm 1).

    For texts of one length, as all here are, so that nothing needs to be masked.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, template="{text}", **kwargs)
        self.model.set_attn_implementation("eager")

    def _part_size(self, layout: Layout) -> int:
        return len(layout.input_ids)

    def _read(self, layout: Layout, **kwargs: Any) -> TokenVectors:
        n = layout.input_ids.shape[1]
        output = self.model(input_ids=layout.input_ids.repeat(1, 2).to(self.model.device), output_attentions=True)
        fused = torch.zeros_like(output.attentions[0][:, 0])
        for layer in output.attentions:
            for attention in layer.unbind(1):
                fused = torch.maximum(fused, (attention + attention.mT) / 2)
        words = fused[:, :n].triu() @ output.last_hidden_state
        return TokenVectors(words, layout.attention_mask.to(words.device), layout.input_ids.to(words.device))


class PaperReBAOneByOne(PaperReBA):
    """The same, one text at a time whatever the batch: what keeps its maps small."""

    def _part_size(self, layout: Layout) -> int:
        return 1


#: What is no recipe: the module and its settings; the pooling stands behind the name.
MODULES: dict[str, tuple[type[CausalModule], dict[str, Any]]] = {
    "ReBA-2 in chunks of 128, mean": (ReBAModule, {"chunk_length": 128}),
    "ReBA-2 in chunks of 128, last": (ReBAModule, {"chunk_length": 128, "rows": "last"}),
    "RT-1, last": (RefinedThoughtModule, {"iterations": 1}),
    "RT-8 with whole passes, last": (WholePasses, {"iterations": 8}),
    "ReBA-2 with all maps stored, mean": (PaperReBA, {}),
    "ReBA-2 with all maps stored, one text at a time, mean": (PaperReBAOneByOne, {}),
}
ONE_PASS, ONE_BY_ONE = "All recipes in one pass", "All recipes, one by one"
#: The recipes of a sweep over three copies.
SWEPT = [
    f"{name}, {pooling}"
    for name in ("Echo-2", "Echo-3", "ReBA-1", "ReBA-2", "ReBA-3", "Classical")
    for pooling in ("mean", "last")
]
Model = SentenceTransformer | RecipeSweep


def make_backbone(size: str, directory: Path, dtype: str, device: str = "cpu") -> Path:
    """A Llama with random weights, and a tokenizer with a token for each of ``WORDS`` words."""
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
    """What tables call such a model."""
    layers, heads, width, _ = SIZES[size]
    return f"Llama, {layers} layers x {heads} heads, width {width}"


def load(name: str, path: Path, given: argparse.Namespace, loaded: dict[bool, CausalTransformer]) -> list[Model]:
    """The model, or models, of a contender.

    Args:
        name: Of a table.
        path: Of the weights.
        given: As typed.
        loaded: Those that are loaded: contenders that store maps, which set how it attends, have one of their own.
    """
    kind, settings = MODULES.get(name, (CausalTransformer, {}))
    if (stores_maps := issubclass(kind, PaperReBA)) not in loaded:
        loaded[stores_maps] = CausalTransformer(str(path), model_kwargs={"dtype": given.dtype}).to(given.device)
    backbone = loaded[stores_maps]
    if name == ONE_PASS:
        return [RecipeSweep(backbone)]
    if name == ONE_BY_ONE:
        return [contender(each, backbone) for each in SWEPT]
    if name in MODULES:
        return [pooled(kind(backbone, **settings), name.rpartition(", ")[2])]
    return [contender(name, backbone)]


def texts(length: int, count: int) -> list[str]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, WORDS, (count, length), generator=generator)
    return [" ".join(f"w{word}" for word in row) for row in ids.tolist()]


def encode(models: Sequence[Model], inputs: list[str]) -> None:
    for model in models:
        model.encode(inputs, batch_size=len(inputs), show_progress_bar=False)


def memory_mib(key: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def measure_memory(models: Sequence[Model], inputs: list[str], on_gpu: bool) -> dict[str, float]:
    """Peak MiB of encoding one batch, above what is loaded; and of the whole process, which is to be its own."""
    gc.collect()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before: float = torch.cuda.memory_allocated()
        encode(models, inputs)
        return {"encoding": (torch.cuda.max_memory_allocated() - before) / 2**20}
    encode(models, texts(4, 1))
    gc.collect()
    before = memory_mib("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
    encode(models, inputs)
    peak = memory_mib("VmHWM:")
    return {"encoding": peak - before, "process": peak}


def rows(
    ratios: Sequence[tuple[str, str]],
    spent: Mapping[str, Sequence[float]],
    used: Mapping[str, Mapping[str, float]],
    tokens: int,
    how: tuple[str, str],
) -> Iterator[Record]:
    """What comes of the seconds of each round, and of the MiB.

    Args:
        ratios: (contender, unit).
        spent: Seconds of every round of every contender.
        used: Peak memory of each contender, by kind; empty if it was not measured.
        tokens: Of the batch.
        how: Time was measured, and memory.
    """
    timed, apart = how
    for name, unit in ratios:
        beside: Record = {"contender": name, "unit": unit}
        yield {**beside, "quantity": "time", "value": ratio(spent[name], spent[unit])["value"], "how": timed}
        for kind, value in used.get(name, {}).items():
            quantity = "peak memory of encoding" if kind == "encoding" else "peak memory of the process"
            yield {**beside, "quantity": quantity, "value": round(value / used[unit][kind], 4), "how": apart}
    for name, seconds in spent.items():
        alone: Record = {"contender": name, "unit": ""}
        yield {**alone, "quantity": "tokens of text/s", "value": round(tokens / median(seconds), 4), "how": timed}
        if used:
            value = round(used[name]["encoding"], 4)
            yield {**alone, "quantity": "MiB of encoding", "value": value, "how": apart}


def memory_alone(name: str, path: Path, length: int, given: argparse.Namespace) -> dict[str, float]:
    """What :func:`measure_memory` finds in a process that does nothing else."""
    torch.set_num_threads(given.threads)
    return measure_memory(load(name, path, given, {}), texts(length, given.batch), on_gpu=False)


def measured(
    given: argparse.Namespace,
    ratios: Sequence[tuple[str, str]],
    path: Path,
    length: int,
    loaded: Mapping[str, Sequence[Model]],
) -> Iterator[Record]:
    """The rows of one length."""
    on_gpu, inputs = given.device != "cpu", texts(length, given.batch)
    contenders = {name: timed(partial(encode, models), given.device) for name, models in loaded.items()}
    # The first round warms up.
    spent = {name: own[1:] for name, own in interleaved(contenders, [inputs] * (given.rounds + 1)).items()}
    used = {}
    for name, own in loaded.items() if not given.no_memory else ():
        if on_gpu:
            used[name] = measure_memory(own, inputs, on_gpu)
            continue
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            used[name] = process.submit(memory_alone, name, path, length, given).result()
    clock = "times by the clock" if on_gpu else "times of the processor"
    apart = "memory that PyTorch counted, once" if on_gpu else "memory in a process of its own, once"
    how = f"{clock}, median of {given.rounds} interleaved round{'s' if given.rounds > 1 else ''}", apart
    return rows(ratios, spent, used, given.batch * length, how)


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, data=False, threads=1)
    made.add_argument("--table", choices=TABLES, default="repetition")
    made.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "base"])
    made.add_argument("--lengths", nargs="+", type=int, default=[32, 128, 512], help="tokens of one copy")
    made.add_argument("--batch", type=int, default=4, help="texts at a time")
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--device", default="cpu")
    made.add_argument("--dtype", default="float32")
    made.add_argument("--only", nargs="+", help="contenders whose ratios are reported; all of the table if left out")
    made.add_argument("--no-memory", action="store_true", help="measure time alone")
    given = options(made, arguments)
    ratios = [pair for pair in TABLES[given.table] if not given.only or pair[0] in given.only]
    names = dict.fromkeys(name for pair in ratios for name in pair)
    with tempfile.TemporaryDirectory() as directory:
        for size in given.sizes:
            path = make_backbone(size, Path(directory), given.dtype, given.device)
            backbones: dict[bool, CausalTransformer] = {}
            loaded = {name: load(name, path, given, backbones) for name in names}
            for length in given.lengths:
                add_costs(
                    measured(given, ratios, path, length, loaded), given, given.device, table=given.table,
                    model=named(size), precision=given.dtype, tokens=length, batch=given.batch,
                )  # fmt: skip


if __name__ == "__main__":
    main()
