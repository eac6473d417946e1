"""What the recipes cost: time and memory of ReBA, Echo, the classical embedding, all of them from one forward pass, and
the paper's own way.

All contenders take turns in one run and share one set of random weights; reported are medians over the rounds of each
round's ratios, so that a busy machine is busy for all. Peak memory is measured in a process for each contender; of a
GPU, whose memory PyTorch counts, in the same one.
What was measured is added to results/cost.csv; ``make tables`` puts it where it is shown.

    python benchmarks/cost.py --batch 8             # half an hour on one core
    python benchmarks/cost.py --sizes small --lengths 32 --rounds 3
    python benchmarks/cost.py --table sweep --sizes small --batch 8
    python benchmarks/cost.py --table chunked --sizes small --lengths 1024 2048 4096 --batch 1
    python benchmarks/cost.py --device cuda --dtype bfloat16 --sizes 1b 7b --lengths 128 512 --batch 8
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, LlamaConfig, PreTrainedTokenizerFast
from transformers.utils import logging

from devices import now
from records import RESULTS, Value, append, machine, versions
from st_reba import CausalTransformer, EchoModule, ReBAModule, RefinedThoughtModule
from st_reba.compare.sweep import RecipeSweep
from st_reba.modules.causal_module import CausalModule, Rows
from st_reba.modules.token_vectors import TokenVectors
from st_reba.text.layout import Layout

WORDS = 1000
POSITIONS = 8192
SIZES = {
    # name: layers, heads, width, width of the MLP
    "small": (12, 8, 512, 1376),
    "base": (12, 12, 768, 2048),
    "1b": (22, 32, 2048, 5632),
    "7b": (32, 32, 4096, 11008),
}
#: (contender, unit): the ratios that are reported. Contenders are called as they are in tables.
REPETITION = (
    ("Echo-2, last", "Classical, last"),
    ("ReBA-2, last", "Echo-2, last"),
    ("ReBA-2, mean", "Echo-2, mean"),
    ("ReBA-2 with all maps stored, mean", "ReBA-2, mean"),
    ("ReBA-2 with all maps stored, one text at a time, mean", "ReBA-2, mean"),
)


PASSES = (
    ("RT-8, last", "RT-1, last"),
    ("RT-8 with whole passes, last", "RT-8, last"),
    ("Bidirectional, last", "Classical, last"),
)
SWEEP = (
    ("All recipes in one pass", "Echo-3, mean"),
    ("All recipes in one pass", "Classical, mean"),
    ("All recipes, one by one", "All recipes in one pass"),
)
CHUNKED = (
    ("ReBA-2 in chunks of 128, mean", "Classical, mean"),
    ("ReBA-2 in chunks of 128, last", "Classical, last"),
    ("ReBA-2, mean", "Classical, mean"),
)
TABLES = {"repetition": REPETITION, "passes": PASSES, "sweep": SWEEP, "chunked": CHUNKED}


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


class OneByOne:
    """The recipes of a sweep over three copies, each on its own."""

    def __init__(self, backbone: CausalTransformer) -> None:
        modules: list[tuple[CausalModule, str]] = []
        both: tuple[tuple[str, Rows], ...] = (("mean", "all"), ("lasttoken", "last"))
        for pooling, rows in both:
            modules.append((CausalTransformer(backbone), pooling))
            modules += [(EchoModule(backbone, repetitions=k), pooling) for k in (2, 3)]
            modules += [(ReBAModule(backbone, repetitions=k, rows=rows), pooling) for k in (1, 2, 3)]
        self.models = [as_model(module, pooling, str(backbone.model.device)) for module, pooling in modules]
        self.device = backbone.model.device

    def encode(self, inputs: list[str], **kwargs: Any) -> None:
        for model in self.models:
            model.encode(inputs, **kwargs)


CONTENDERS: dict[str, tuple[type[CausalModule], dict[str, Any], str]] = {
    "Classical, mean": (CausalTransformer, {}, "mean"),
    "Echo-3, mean": (EchoModule, {"repetitions": 3}, "mean"),
    "Classical, last": (CausalTransformer, {}, "lasttoken"),
    "Echo-2, last": (EchoModule, {}, "lasttoken"),
    "Echo-2, mean": (EchoModule, {}, "mean"),
    "ReBA-2, last": (ReBAModule, {"rows": "last"}, "lasttoken"),
    "ReBA-2, mean": (ReBAModule, {}, "mean"),
    "ReBA-2 in chunks of 128, mean": (ReBAModule, {"chunk_length": 128}, "mean"),
    "ReBA-2 in chunks of 128, last": (ReBAModule, {"chunk_length": 128, "rows": "last"}, "lasttoken"),
    "RT-1, last": (RefinedThoughtModule, {"iterations": 1}, "lasttoken"),
    "RT-8, last": (RefinedThoughtModule, {"iterations": 8}, "lasttoken"),
    "RT-8 with whole passes, last": (WholePasses, {"iterations": 8}, "lasttoken"),
    "Bidirectional, last": (CausalTransformer, {"bidirectional_layers": 1}, "lasttoken"),
    "ReBA-2 with all maps stored, mean": (PaperReBA, {}, "mean"),
    "ReBA-2 with all maps stored, one text at a time, mean": (PaperReBAOneByOne, {}, "mean"),
}
#: Those that give many embeddings of a text: Classical, Echo-2 and -3, ReBA-1 to -3, under mean and last pooling.
SWEEPS: dict[str, Any] = {"All recipes in one pass": RecipeSweep, "All recipes, one by one": OneByOne}


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


Model = SentenceTransformer | RecipeSweep | OneByOne


class Loaded:
    """The contenders on one set of weights; those that store maps, which set how it attends, on a second one."""

    def __init__(self, path: Path, device: str, dtype: str) -> None:
        self.path, self.device, self.dtype = path, device, dtype
        self._backbones: dict[bool, CausalTransformer] = {}

    def load(self, contender: str) -> Model:
        if contender in SWEEPS:
            return SWEEPS[contender](self._backbone(stores_maps=False))
        module_class, settings, pooling = CONTENDERS[contender]
        backbone = self._backbone(stores_maps=issubclass(module_class, PaperReBA))
        return as_model(module_class(backbone, **settings), pooling, self.device)

    def _backbone(self, *, stores_maps: bool) -> CausalTransformer:
        if stores_maps not in self._backbones:
            backbone = CausalTransformer(str(self.path), model_kwargs={"dtype": self.dtype})
            self._backbones[stores_maps] = backbone.to(self.device)
        return self._backbones[stores_maps]


def as_model(module: CausalModule, pooling: str, device: str) -> SentenceTransformer:
    return SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension(), pooling)], device=device)


def texts(length: int, count: int) -> list[str]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, WORDS, (count, length), generator=generator)
    return [" ".join(f"w{word}" for word in row) for row in ids.tolist()]


def seconds(model: Model, inputs: list[str]) -> float:
    """Of the processor; by the clock where an accelerator works."""
    place = str(model.device)
    start = now(place)
    model.encode(inputs, batch_size=len(inputs), show_progress_bar=False)
    return now(place) - start


def times(models: Mapping[str, Model], length: int, batch: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round of every contender, all on one machine at one time."""
    inputs = texts(length, batch)
    for model in models.values():
        seconds(model, inputs)
    turns = [[seconds(model, inputs) for model in models.values()] for _ in range(rounds)]
    return {contender: list(spent) for contender, spent in zip(models, zip(*turns, strict=True), strict=True)}


def memory_mib(key: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def measure_memory(contender: str, path: Path, length: int, batch: int, dtype: str) -> dict[str, float]:
    """Peak memory of encoding one batch, above that of the loaded model, and of the whole process. Run in its own."""
    model = Loaded(path, "cpu", dtype).load(contender)
    seconds(model, texts(4, 1))
    inputs = texts(length, batch)
    gc.collect()
    before = memory_mib("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
    seconds(model, inputs)
    peak = memory_mib("VmHWM:")
    return {"encoding": peak - before, "process": peak}


def memory(names: Sequence[str], path: Path, length: int, batch: int, dtype: str) -> dict[str, dict[str, float]]:
    """Of each contender, MiB by kind."""
    result = {}
    for contender in names:
        arguments = [contender, str(path), str(length), str(batch), dtype]
        done = subprocess.run(
            [sys.executable, __file__, "--memory-of", *arguments], check=True, capture_output=True, text=True
        )
        result[contender] = json.loads(done.stdout.splitlines()[-1])
    return result


def memory_of_gpu(models: Mapping[str, Model], length: int, batch: int) -> dict[str, dict[str, float]]:
    """The same where PyTorch counts the bytes: above what all contenders hold."""
    result = {}
    inputs = texts(length, batch)
    for contender, model in models.items():
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds(model, inputs)
        result[contender] = {"encoding": (torch.cuda.max_memory_allocated() - before) / 2**20}
    return result


class Setting(NamedTuple):
    """What was run: everything that a row of cost.csv says beside the figure."""

    table: str
    model: str
    precision: str
    tokens: int
    batch: int
    rounds: int
    timed: str = "times by the clock"
    apart: str = "memory in a process of its own, once"

    def row(self, quantity: str, contender: str, unit: str, value: float, how: str) -> dict[str, Value]:
        return {
            "table": self.table, "quantity": quantity, "contender": contender, "unit": unit, "model": self.model,
            "precision": self.precision, "tokens": self.tokens, "batch": self.batch, "value": round(value, 4),
            "how": how,
        }  # fmt: skip

    def rows(
        self,
        ratios: Sequence[tuple[str, str]],
        spent: Mapping[str, list[float]],
        used: Mapping[str, Mapping[str, float]],
    ) -> list[dict[str, Value]]:
        """What comes of the seconds of each round, and of the MiB.

        Args:
            ratios: (contender, unit).
            spent: Seconds of every round of every contender.
            used: Peak memory of each contender, by kind; empty if it was not measured.
        """
        timed = f"{self.timed}, median of {self.rounds} interleaved round{'s' if self.rounds > 1 else ''}"
        rows = []
        for contender, unit in ratios:
            ratio = median(a / b for a, b in zip(spent[contender], spent[unit], strict=True))
            rows.append(self.row("time", contender, unit, ratio, timed))
        for kind, quantity in (("encoding", "peak memory of encoding"), ("process", "peak memory of the process")):
            for contender, unit in ratios if kind in next(iter(used.values()), ()) else ():
                rows.append(self.row(quantity, contender, unit, used[contender][kind] / used[unit][kind], self.apart))
        for contender in spent:
            speed = self.batch * self.tokens / median(spent[contender])
            rows.append(self.row("tokens of text/s", contender, "", speed, timed))
            if used:
                rows.append(self.row("MiB of encoding", contender, "", used[contender]["encoding"], self.apart))
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=TABLES, default="repetition")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "base"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[32, 128, 512], help="tokens of one copy")
    parser.add_argument("--batch", type=int, default=4, help="texts at a time")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="more than one lies on a shared machine")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", nargs="+", help="contenders whose ratios are reported; all of the table if left out")
    parser.add_argument("--no-memory", action="store_true", help="measure time alone")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of cost.csv")
    parser.add_argument("--memory-of", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        contender, path, length, batch, dtype = options.memory_of
        print(json.dumps(measure_memory(contender, Path(path), int(length), int(batch), dtype)))
        return

    where = {
        "machine": machine(options.device, options.threads),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d"),
    }
    ratios = [pair for pair in TABLES[options.table] if not options.only or pair[0] in options.only]
    on_gpu = options.device != "cpu"
    timed = "times by the clock" if on_gpu else "times of the processor"
    apart = "memory that PyTorch counted, once" if on_gpu else "memory in a process of its own, once"
    names = [name for name in (*CONTENDERS, *SWEEPS) if any(name in pair for pair in ratios)]
    with tempfile.TemporaryDirectory() as directory:
        for size in options.sizes:
            path = make_backbone(size, Path(directory), options.dtype, options.device)
            layers, heads, width, _ = SIZES[size]
            model = f"Llama, {layers} layers x {heads} heads, width {width}"
            loaded = Loaded(path, options.device, options.dtype)
            contenders = {name: loaded.load(name) for name in names}
            for length in options.lengths:
                spent = times(contenders, length, options.batch, options.rounds)
                used: dict[str, dict[str, float]] = {}
                if not options.no_memory and on_gpu:
                    used = memory_of_gpu(contenders, length, options.batch)
                elif not options.no_memory:
                    used = memory(names, path, length, options.batch, options.dtype)
                setting = Setting(
                    options.table, model, options.dtype, length, options.batch, options.rounds, timed, apart
                )
                rows = [{**row, **where} for row in setting.rows(ratios, spent, used)]
                file = append("cost", rows, options.results)
                for row in rows:
                    beside = f" / {row['unit']}" if row["unit"] else ""
                    print(f"{model}, n = {length}: {row['quantity']}: {row['contender']}{beside}: {row['value']:.4g}")
                print(f"{len(rows)} rows added to {file}", flush=True)


if __name__ == "__main__":
    main()
