"""Train the demo LM on the output of prepare.py, for a stated number of tokens.

    OMP_WAIT_POLICY=PASSIVE python scripts/demo_lm/train.py --data DIR --out DIR --tokens N

``--out`` becomes a model directory: bfloat16 weights, configuration and tokenizer. A run that was stopped goes on from
its last checkpoint, which lies beside ``--out``, and ends with the same weights as one that was not: batch and learning
rate are functions of seed and step, never of time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from transformers import LlamaConfig, LlamaForCausalLM

from muon import Muon
from prepare import MAX_LENGTH
from st_reba.files import durable

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
WARMUP_STEPS = 100
DECAY_FROM = 0.4  # share of the steps after which the rate falls, linearly, to 0
SAVE_EVERY_S = 300.0
HEAD_WIDTH = 64


@dataclass(frozen=True)
class Size:
    """A shape of Llama: 8 layers of a width, with tied embeddings."""

    width: int
    inner_width: int
    layers: int = 8


#: "8M" for a CPU; "16M" is the largest of at most 32 MB in bfloat16, for an accelerator; "tiny" for the test.
SIZES = {"8M": Size(256, 688), "16M": Size(384, 880), "tiny": Size(64, 96, layers=2)}


@dataclass(frozen=True)
class Settings:
    """All that the weights depend on, beside the text and the device.

    Attributes:
        tokens: The budget: tokens of training text to read, repeats included.
        size: Name in SIZES; where training starts from another shape of model, "other".
        batch: Windows in a step.
        length: Tokens in a window.
        matrix_lr: Peak rate of Muon, for the matrices inside the layers.
        other_lr: Peak rate of AdamW, for the embeddings and norms.
        precision: Of the matrix products: ``"float32"`` or ``"bfloat16"``.
        workers: Threads that share a batch and the cores. More rounds differently, so it belongs to the run.
        rate: Share of the peak rates; less than 1 where the weights are trained already.
        start: Digest of the weights to start from; empty where they are random.
    """

    tokens: int
    size: str = "8M"
    batch: int = 16
    length: int = 256
    matrix_lr: float = 0.02
    other_lr: float = 3e-3
    precision: str = "float32"
    workers: int = 1
    rate: float = 1.0
    start: str = ""
    seed: int = 0

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / (self.batch * self.length))


def build_model(settings: Settings, vocabulary: int) -> LlamaForCausalLM:
    """A Llama whose blocks begin as the identity, so that the first steps are those of a shallow model."""
    size = SIZES[settings.size]
    torch.manual_seed(settings.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=size.width,
            intermediate_size=size.inner_width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.width // HEAD_WIDTH,
            num_key_value_heads=size.width // HEAD_WIDTH,
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model.train()


def started_model(start: Path) -> LlamaForCausalLM:
    """A trained model, to go on with."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    return model.train()


def size_of(start: Path) -> str:
    """The name in SIZES of a model directory's shape; "other" if it has none there."""
    config = LlamaConfig.from_pretrained(start)
    shape = Size(config.hidden_size, config.intermediate_size, config.num_hidden_layers)
    return next((name for name, size in SIZES.items() if size == shape), "other")


def digest(start: Path) -> str:
    """Of a model directory's weights.

    Raises:
        ValueError: If it has none.
    """
    files = sorted(start.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{start} has no safetensors: give the directory of the model to start from.")
    found = hashlib.sha256()
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()


def build_optimizers(model: LlamaForCausalLM, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, one for each worker; AdamW for the rest."""
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    shares = [matrices[worker :: settings.workers] for worker in range(settings.workers)]
    return [
        *(Muon(share, lr=settings.rate * settings.matrix_lr, weight_decay=0.01) for share in shares),
        torch.optim.AdamW(rest, lr=settings.rate * settings.other_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def rate(step: int, steps: int) -> float:
    """Share of the peak rate: a linear rise, a plateau, a linear fall to 0."""
    rise = min(1.0, (step + 1) / min(WARMUP_STEPS, steps))
    return min(rise, (1 - step / steps) / (1 - DECAY_FROM))


def windows(stream: Tensor, settings: Settings, step: int) -> Tensor:
    """The batch of a step, (batch, length + 1): every epoch reads all of the stream, in an order and at an offset of
    its own."""
    count = (len(stream) - 1) // settings.length - 1
    first = step * settings.batch
    rows = []
    for position in range(first, first + settings.batch):
        epoch, place = divmod(position, count)
        offset, order = _epoch(settings.seed, epoch, count, settings.length)
        start = offset + int(order[place]) * settings.length
        rows.append(stream[start : start + settings.length + 1])
    return torch.stack(rows)


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, count: int, length: int) -> tuple[int, np.ndarray]:
    """Where an epoch's first window begins, and the order of its windows."""
    rng = np.random.default_rng((seed, epoch))
    return int(rng.integers(length)), rng.permutation(count)


def batch_loss(model: LlamaForCausalLM, batch: Tensor, precision: str) -> Tensor:
    """Next-token loss in nats, summed over the batch."""
    with torch.autocast(batch.device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16"):
        hidden = model.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
        logits = linear(hidden, model.lm_head.weight)
    return cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")


class Workers:
    """Threads that share the work of a step, and the cores.

    Products of this model are too small to be shared well by two cores: two threads with half a batch each made 1.6
    times as many tokens a second as one thread whose products ran on both.
    """

    def __init__(self, settings: Settings) -> None:
        if settings.workers < 1 or settings.batch % settings.workers:
            raise ValueError(
                f"{settings.workers} workers cannot share a batch of {settings.batch}: give a divisor of it."
            )
        self._precision = settings.precision
        self._count = settings.workers
        threads = max(1, torch.get_num_threads() // settings.workers)
        self._pool = ThreadPoolExecutor(settings.workers, initializer=torch.set_num_threads, initargs=(threads,))

    def gradient(self, model: LlamaForCausalLM, batch: Tensor) -> Tensor:
        """The mean loss, whose gradient is left in the parameters' ``grad``."""
        parameters = list(model.parameters())

        def share_of(rows: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            loss = batch_loss(model, rows, self._precision) / batch[:, 1:].numel()
            return loss.detach(), torch.autograd.grad(loss, parameters)

        losses, gradients = zip(*self._pool.map(share_of, batch.chunk(self._count)), strict=True)
        for parameter, *parts in zip(parameters, *gradients, strict=True):
            parameter.grad = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
        return torch.stack(losses).sum()

    def step(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """One step of each optimizer."""
        list(self._pool.map(lambda optimizer: optimizer.step(), optimizers))


class Progress(NamedTuple):
    """How far a run is.

    Attributes:
        step: Steps made.
        loss: Smoothed, in nats per token.
        seconds: Spent in training, over all starts.
    """

    step: int = 0
    loss: float = math.nan
    seconds: float = 0.0


class Checkpoint:
    """Where a run that was stopped goes on: weights, optimizers and step, written whole or not at all.

    Raises:
        ValueError: If the file is of a run with other settings or on another device or text.
    """

    def __init__(self, path: Path, run: dict[str, object]) -> None:
        self.path = path
        self._run = run

    def save(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], progress: Progress) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        states = [optimizer.state_dict() for optimizer in optimizers]
        found = {"run": self._run, "model": model.state_dict(), "optimizers": states, "progress": tuple(progress)}
        with durable(self.path) as file:
            torch.save(found, file)

    def load(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Progress:
        """Where to go on; the beginning, where there is no checkpoint."""
        if not self.path.is_file():
            return Progress()
        found = torch.load(self.path, map_location="cpu", weights_only=True)
        for name, now in self._run.items():
            if (then := found["run"].get(name)) != now:
                raise ValueError(
                    f"{self.path} is of a run with {name} = {then}, but now it is {now}. Give what was given then to "
                    "go on with it, or remove it."
                )
        model.load_state_dict(found["model"])
        for optimizer, state in zip(optimizers, found["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        return Progress(*found["progress"])


def train(
    settings: Settings,
    stream: Tensor,
    vocabulary: int,
    checkpoint: Path,
    device: str = "cpu",
    start: Path | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> tuple[LlamaForCausalLM, Progress]:
    """Train to the end of the budget.

    Args:
        settings: What to train, and how.
        stream: Token ids, (n,).
        vocabulary: Number of tokens.
        checkpoint: The file to go on from, if it exists, and to write every five minutes.
        device: Where to train.
        start: A model directory to take the first weights from, instead of random ones.
        on_step: Called after each step.

    Raises:
        ValueError: If the stream is too short for a window, or the checkpoint is another run's.
        FloatingPointError: If the loss is no longer finite.
    """
    if len(stream) < 3 * settings.length:
        raise ValueError(
            f"the stream has {len(stream)} tokens; at least {3 * settings.length} are needed for windows of "
            f"{settings.length}. Give more text."
        )
    workers = Workers(settings)
    model = (build_model(settings, vocabulary) if start is None else started_model(start)).to(device)  # type: ignore[arg-type]
    optimizers = build_optimizers(model, settings)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    text = {"stream length": len(stream), "stream sum": int(stream.sum())}
    saved = Checkpoint(checkpoint, {**asdict(settings), "vocabulary": vocabulary, "device": device, **text})
    progress = begun = saved.load(model, optimizers)
    begin = last_save = time.monotonic()
    for step in range(begun.step, settings.steps):
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate(step, settings.steps)
        loss = workers.gradient(model, windows(stream, settings, step).to(device))
        smooth = _smoothed(progress.loss, loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        workers.step(optimizers)
        now = time.monotonic()
        progress = Progress(step + 1, smooth, begun.seconds + now - begin)
        if progress.step % 20 == 0:
            speed = (progress.step - begun.step) * settings.batch * settings.length / (now - begin)
            print(f"step {progress.step} of {settings.steps}  loss {smooth:.3f}  {speed:.0f} tokens/s", flush=True)
        if now - last_save > SAVE_EVERY_S:
            saved.save(model, optimizers, progress)
            last_save = now
        on_step(progress.step)
    saved.save(model, optimizers, progress)
    return model, progress


def _smoothed(before: float, now: float) -> float:
    if not math.isfinite(now):
        raise FloatingPointError(f"the loss is {now}: lower the learning rates; the last checkpoint is kept.")
    return now if math.isnan(before) else 0.98 * before + 0.02 * now


def faster_precision(device: str) -> str:
    """Which of float32 and bfloat16 multiplies this model's matrices faster here, measured."""
    took = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        left, right = (torch.ones(2048, 256, dtype=dtype, device=device) for _ in range(2))
        times = []
        for _ in range(5):
            start = time.perf_counter()
            (left @ right.T)[0, 0].item()
            times.append(time.perf_counter() - start)
        took[name] = min(times)
    return min(took, key=lambda name: took[name])


def save_model(model: LlamaForCausalLM, data: Path, out: Path, settings: Settings) -> None:
    """The model directory: bfloat16 weights in files of at most 16 MiB, tokenizer, and what it was trained with."""
    whole = "15MB" if settings.size == "16M" else "5GB"
    model.to("cpu", torch.bfloat16).save_pretrained(out, max_shard_size=whole)  # type: ignore[arg-type]
    for name in TOKENIZER_FILES:
        shutil.copyfile(data / name, out / name)
    (out / "training.json").write_text(json.dumps(asdict(settings), indent=1), encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this script and make.py ask of a user."""
    parser.add_argument("--tokens", type=int, required=True, help="training tokens, the budget")
    parser.add_argument("--size", choices=SIZES, help="8M (default) for a CPU, 16M for an accelerator")
    parser.add_argument("--start", type=Path, help="model directory whose weights and tokenizer to go on with")
    parser.add_argument("--rate", type=float, default=1.0, help="share of the peak learning rates, for --start")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), help="default: the one that is faster here")
    parser.add_argument("--workers", type=int, default=1, help="threads that share a batch and the cores")
    parser.add_argument("--seed", type=int, default=0)


def _tokenizer(directory: Path) -> str:
    return (directory / "tokenizer.json").read_text(encoding="utf-8")


def run(options: argparse.Namespace, data: Path, out: Path) -> tuple[Settings, Progress]:
    """Train as asked on the command line, and write the model.

    Raises:
        ValueError: If the options, the data or a checkpoint do not fit.
    """
    if options.tokens < 1:
        raise ValueError(f"--tokens {options.tokens}: give a positive number of training tokens.")
    if missing := [name for name in ("train.npy", *TOKENIZER_FILES) if not (data / name).is_file()]:
        raise ValueError(f"no {', '.join(missing)} in {data}: run prepare.py --out {data} first.")
    if options.start is not None and options.size is not None:
        raise ValueError("--size is that of the model that --start names: give one of them.")
    if options.start is not None and _tokenizer(data) != _tokenizer(options.start):
        raise ValueError(
            f"{data} was made with another tokenizer than that of {options.start}: give prepare.py the same --start."
        )
    settings = Settings(
        tokens=options.tokens,
        size=options.size or (Settings.size if options.start is None else size_of(options.start)),
        precision=options.precision or faster_precision(options.device),
        workers=options.workers,
        rate=options.rate,
        start="" if options.start is None else digest(options.start),
        seed=options.seed,
    )
    stream = torch.from_numpy(np.load(data / "train.npy").astype(np.int64))
    vocabulary = len(json.loads((data / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])
    checkpoint = out.with_name(f"{out.name}.checkpoint.pt")
    model, progress = train(settings, stream, vocabulary, checkpoint, options.device, options.start)
    save_model(model, data, out, settings)
    return settings, progress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="output directory of prepare.py")
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    add_arguments(parser)
    options = parser.parse_args()
    try:
        run(options, options.data, options.out)
    except (ValueError, FloatingPointError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
