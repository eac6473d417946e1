"""GGUF files in llama.cpp beside the same files unpacked by transformers: states, scores, memory, time.

    python benchmarks/llama_cpp.py --data DIR --models DIR    # SmolLM2-135M; half an hour on one core
    python benchmarks/llama_cpp.py --data DIR --models DIR --model "Gemma 3 270M" --parts cosines memory

"cosines": each text's embedding beside that of transformers in float32. "scores": Spearman on pairs of STS-B. "memory":
what a process holds more than before it loaded the model, each contender in a process of its own. "times": texts a
second; contenders take turns. "ways": states out of the JSON of xllamacpp's server beside our calls. With one thread,
time is the processor's; with more, it is the clock's, and the fastest of the rounds counts. Rows are added to
results/llama_cpp.csv.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer

from real.models import MODELS
from records import Record, append, machine, today
from runs import contender, encoding, interleaved, options, parser
from st_reba import CausalTransformer, LlamaCppTransformer, build
from st_reba.data.tables import read_pairs
from st_reba.modules import CausalModule

LLAMA_CPP, FLOAT32, BFLOAT16 = "llama.cpp", "transformers, float32", "transformers, bfloat16"
CONTENDERS = (LLAMA_CPP, FLOAT32, BFLOAT16)
RECIPES = ("Classical, mean", "PromptEOL, last", "Echo-2, mean")
PARTS = ("cosines", "scores", "memory", "times", "ways")
SHORT, LONG = "texts of 16 tokens", "texts of 256 tokens"


def loaded(kind: str, file: Path) -> CausalModule:
    """The language model of a file, as a contender runs it."""
    if kind == LLAMA_CPP:
        return LlamaCppTransformer(str(file))
    return CausalTransformer(str(file), model_kwargs={"dtype": kind.rpartition(" ")[2]})


def cosines(file: Path, texts: Sequence[str]) -> Iterator[Record]:
    """The median and the lowest cosine of a text's two embeddings, by recipe."""
    ours, theirs = loaded(LLAMA_CPP, file), loaded(FLOAT32, file)
    for recipe in RECIPES:
        one, other = (
            contender(recipe, module).encode(list(texts), batch_size=8, convert_to_tensor=True).float()
            for module in (ours, theirs)
        )
        found = torch.cosine_similarity(one, other).tolist()
        row: Record = {"quantity": "cosine to transformers, float32", "contender": recipe, "texts": len(texts)}
        yield {**row, "value": round(median(found), 4), "low": round(min(found), 4)}


def scores(file: Path, data: Path, count: int) -> Iterator[Record]:
    """Spearman's correlation on pairs; echo-topic is fitted on the sentences of the package, by each for itself."""
    pairs = read_pairs(data / "stsb_en_test.tsv")
    for kind in (LLAMA_CPP, FLOAT32):
        module = loaded(kind, file)
        for recipe in ("PromptEOL, last", "Echo topic"):
            model = build(module, "echo-topic") if recipe == "Echo topic" else contender(recipe, module)
            left, right = (
                model.encode(list(side)[:count], convert_to_tensor=True) for side in (pairs.first, pairs.second)
            )
            found = torch.cosine_similarity(left, right).float().cpu().numpy()
            score = float(spearmanr(found, np.asarray(pairs.scores[:count])).statistic)
            row: Record = {"quantity": f"Spearman x 100, {recipe}", "contender": kind, "texts": 2 * count}
            yield {**row, "set": "STS-B en test", "value": round(100 * score, 2)}


def resident() -> float:
    """Megabytes of this process that lie in memory, mapped files included."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmRSS"))


def memory_here(kind: str, file: Path, texts: Sequence[str]) -> None:
    """Print the megabytes before a model is loaded, and when it has embedded texts."""
    before = resident()
    model = contender("PromptEOL, last", loaded(kind, file))
    encoding(model, 8)(texts)
    print(json.dumps([before, resident()]))


def memory(file: Path) -> Iterator[Record]:
    """What a process holds more than before, by contender; all has been read out of the file before."""
    for kind in CONTENDERS:
        loaded(kind, file)
    for kind in CONTENDERS:
        command = [sys.executable, __file__, "--memory-of", kind, "--file", str(file), "--data", "."]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        before, after = json.loads(said)
        row: Record = {"quantity": "resident memory, MB", "contender": kind, "value": round(after - before)}
        yield {**row, "high": round(after)}


def of_tokens(module: CausalModule, words: str, tokens: int, count: int) -> list[str]:
    """Texts of about as many tokens, out of running text."""
    ids = module.token_ids([words])[0]
    return [str(module._tokenizer.decode(ids[first * tokens : (first + 1) * tokens])) for first in range(count)]


def times(file: Path, data: Path, threads: int, rounds: int) -> Iterator[Record]:
    """Texts a second with the classical embedding, by contender, in texts of two lengths."""
    words = " ".join(read_pairs(data / "stsb_en_train.tsv").texts()[:1500])
    now = time.process_time if threads == 1 else time.perf_counter
    models = {kind: contender("Classical, mean", loaded(kind, file)) for kind in CONTENDERS}
    for name, tokens, count in ((SHORT, 16, 16), (LONG, 256, 2)):
        texts = of_tokens(loaded(LLAMA_CPP, file), words, tokens, count * rounds)

        def speed(model: SentenceTransformer, part: Sequence[str]) -> float:
            start = now()
            encoding(model, 16)(part)
            return len(part) / (now() - start)

        def run(kind: str) -> Callable[[Sequence[str]], float]:
            return lambda part: speed(models[kind], part)

        for model in models.values():
            encoding(model, 16)(texts[:1])
        parts = [texts[first * count : (first + 1) * count] for first in range(rounds)]
        for kind, found in interleaved({kind: run(kind) for kind in CONTENDERS}, parts).items():
            typical = median(found) if threads == 1 else max(found)
            row: Record = {"quantity": "texts/s", "set": name, "contender": kind, "threads": threads}
            yield {**row, "texts": count, "value": round(typical, 2), "low": round(min(found), 2)}


def ways(file: Path, rounds: int) -> Iterator[Record]:
    """The processor's time for the states of one text: the server's JSON over our calls."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.embedding = str(file), True
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_NONE
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_parallel, params.n_ctx, params.n_batch, params.n_ubatch = 1, 1024, 1024, 1024
    server = xllamacpp.Server(params)
    module = loaded(LLAMA_CPP, file)
    draw = np.random.default_rng(0)

    def of_server(ids: Sequence[int]) -> NDArray[np.float32]:
        body = json.dumps({"content": list(ids), "embd_normalize": -1}).encode()
        asked = urllib.request.Request(f"{server.listening_address}/embedding", body)
        with urllib.request.urlopen(asked) as answer:
            return np.array(json.load(answer)[0]["embedding"], dtype=np.float32)

    def of_calls(ids: Sequence[int]) -> NDArray[np.float32]:
        with torch.inference_mode():
            return module.model(torch.tensor([list(ids)])).last_hidden_state[0].numpy()

    for name, tokens in ((SHORT, 16), (LONG, 256)):
        texts = [draw.integers(100, 10_000, tokens).tolist() for _ in range(rounds)]

        def took(run: Callable[[Sequence[int]], object]) -> Callable[[Sequence[int]], float]:
            def measured(ids: Sequence[int]) -> float:
                start = time.process_time()
                run(ids)
                return time.process_time() - start

            return measured

        alike = torch.cosine_similarity(torch.tensor(of_server(texts[0])), torch.tensor(of_calls(texts[0])), dim=-1)
        print(f"{name}: lowest cosine of the two ways {float(alike.min()):.4f}", flush=True)
        found = interleaved({"server": took(of_server), "calls": took(of_calls)}, texts)
        each = [one / other for one, other in zip(found["server"], found["calls"], strict=True)]
        row: Record = {"quantity": "time / our calls", "contender": "the server's JSON", "set": name, "threads": 1}
        yield {**row, "value": round(median(each), 2), "low": round(min(each), 2), "high": round(max(each), 2)}


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, threads=1)
    made.add_argument("--models", type=Path, default=Path("build/models"), help="directory of the models' packages")
    made.add_argument(
        "--model", default="SmolLM2-135M-Instruct", choices=[name for name, it in MODELS.items() if not it.embedder]
    )
    made.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    made.add_argument("--pairs", type=int, default=200)
    made.add_argument("--texts", type=int, default=40, help="whose cosines are looked at")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--memory-of", choices=CONTENDERS, help="print what this one takes, and end")
    made.add_argument("--file", type=Path, help="with --memory-of: a GGUF file")
    given = options(made, arguments)
    if given.memory_of:
        memory_here(given.memory_of, given.file, ["A man is playing a guitar on the stage."] * 16 + ["word " * 256])
        return
    file = MODELS[given.model].located(given.models)
    where = {"model": given.model, "size": round(file.stat().st_size / 1e6)}
    for part in given.parts:
        if part == "cosines":
            rows = cosines(file, read_pairs(given.data / "stsb_en_test.tsv").texts()[: given.texts])
        elif part == "scores":
            rows = scores(file, given.data, given.pairs)
        elif part == "memory":
            rows = memory(file)
        elif part == "times":
            rows = times(file, given.data, given.threads, given.rounds)
        else:
            rows = ways(file, given.rounds)
        shared = {**where, "machine": machine("cpu", given.threads), **today()}
        for row in rows:
            append("llama_cpp", [{**row, **shared}], given.results)
            print(row, flush=True)


if __name__ == "__main__":
    main()
