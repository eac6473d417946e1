"""The demo LM from raw text, in one command: corpus, tokenizer, training, evaluation, data card.

    OMP_WAIT_POLICY=PASSIVE python scripts/demo_lm/make.py --corpus DIR --out DIR --tokens N

``--corpus`` holds the five files that CARD.md lists. ``--out`` becomes the model directory; what leads to it lies
beside it, in ``OUT.data`` and ``OUT.checkpoint.pt``. Stopped and started again, it goes on where it was.
"""

from __future__ import annotations

import argparse
import platform
import string
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import held_out
import prepare
import train

CARD = Path(__file__).with_name("CARD.md")


def write_card(
    out: Path, settings: train.Settings, held_out_file: Path, progress: train.Progress, start: Path | None
) -> None:
    """The data card, with the figures of this model."""
    model = AutoModelForCausalLM.from_pretrained(out)
    device = platform.processor() or platform.machine()
    found = string.Template(CARD.read_text(encoding="utf-8")).substitute(
        parameters=f"{model.num_parameters() / 1e6:.1f}M",
        megabytes=f"{sum(path.stat().st_size for path in out.glob('*.safetensors')) / 1e6:.1f} MB",
        layers=model.config.num_hidden_layers,
        heads=model.config.num_attention_heads,
        width=model.config.hidden_size,
        start=_origin(start, settings),
        tokens=f"{settings.tokens / 1e6:.1f}M",
        steps=f"{settings.steps:,}",
        batch=settings.batch,
        length=settings.length,
        precision=settings.precision,
        seed=settings.seed,
        minutes=f"{progress.seconds / 60:.0f}",
        loss=f"{progress.loss:.2f}",
        machine=f"{device}, {max(settings.workers, torch.get_num_threads())} threads",
        held_out=held_out.table([out], held_out_file),
    )
    (out / "README.md").write_text(found, encoding="utf-8")


def _origin(start: Path | None, settings: train.Settings) -> str:
    """Which weights training began with."""
    if start is None:
        return "from random weights"
    return f"from trained weights, `{start.name}` (sha256 {settings.start[:16]}), whose tokenizer it keeps"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="directory with the training text")
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--vocabulary", type=int, default=prepare.VOCAB, help="tokens of the tokenizer")
    train.add_arguments(parser)
    options = parser.parse_args(arguments)
    data = options.out.with_name(f"{options.out.name}.data")
    try:
        if not (data / "train.npy").is_file():
            prepare.prepare(options.corpus, data, options.vocabulary, options.start)
        settings, progress = train.run(options, data, options.out)
        write_card(options.out, settings, data / "held_out.json", progress, options.start)
    except (FileNotFoundError, ValueError, FloatingPointError) as error:
        parser.error(str(error))
    print((options.out / "README.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
