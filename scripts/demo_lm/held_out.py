"""How well a language model predicts held-out text, in bits per character, so that tokenizers can differ.

    python scripts/demo_lm/held_out.py --held-out DIR/held_out.json MODEL [MODEL ...]
    python scripts/demo_lm/held_out.py --sentences zh=FILE.tsv en=FILE.tsv MODEL [MODEL ...]

``--held-out`` is what prepare.py set aside. ``--sentences`` takes files with tab-separated sentences of a language, the
first two columns of each row (the training part of STS-B, say): text of another kind. For each it also says how much
better a sentence is predicted where it stands for the second time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

LENGTH = 256  # tokens of a piece, as in training
BATCH = 16
LN2 = 0.6931471805599453
SENTENCES = 1000  # of each file


class Score(NamedTuple):
    """What predicting a text costs.

    Attributes:
        bits: Its negative log-likelihood to base 2.
        characters: Its length.
        tokens: Its length in the model's tokens.
    """

    bits: float
    characters: int
    tokens: int

    @property
    def per_character(self) -> float:
        return self.bits / self.characters

    @property
    def nats_per_token(self) -> float:
        return self.bits * LN2 / self.tokens


def score(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Score:
    """Texts in pieces of 256 tokens, each piece on its own, behind the token that begins a document."""
    pieces = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        pieces += [ids[i : i + LENGTH] for i in range(0, len(ids), LENGTH)]
    return Score(sum(_nats(model, tokenizer, pieces)) / LN2, sum(map(len, texts)), sum(map(len, pieces)))


def second_reading(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> tuple[float, float]:
    """Nats per token of sentences, and of the same sentences where they stand for the second time."""
    ids = [found for text in texts if (found := tokenizer(text, add_special_tokens=False)["input_ids"])]
    once = _nats(model, tokenizer, ids)
    both = _nats(model, tokenizer, [found * 2 for found in ids])
    tokens = sum(map(len, ids))
    return sum(once) / tokens, (sum(both) - sum(once)) / tokens


@torch.inference_mode()
def _nats(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pieces: Sequence[Sequence[int]]) -> list[float]:
    found = [0.0] * len(pieces)
    order = sorted(range(len(pieces)), key=lambda i: len(pieces[i]))
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        width = max(len(pieces[i]) for i in chosen)
        # Causal: what stands behind a piece does not change it.
        ids = torch.zeros(len(chosen), width + 1, dtype=torch.long)
        ids[:, 0] = tokenizer.bos_token_id
        real = torch.zeros(len(chosen), width, dtype=torch.bool)
        for row, i in enumerate(chosen):
            ids[row, 1 : len(pieces[i]) + 1] = torch.tensor(pieces[i])
            real[row, : len(pieces[i])] = True
        logits = model(input_ids=ids[:, :-1]).logits
        nats = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(real)
        for i, value in zip(chosen, _sums(nats, real), strict=True):
            found[i] = value
    return found


def _sums(nats: Tensor, real: Tensor) -> list[float]:
    return nats.double().masked_fill(~real, 0.0).sum(dim=1).tolist()


def held_out_scores(model: Path, held_out: Path) -> dict[str, Score]:
    """By language, and by source below it; sources of which nothing was held out are left out."""
    loaded, tokenizer = load(model)
    scores: dict[str, Score] = {}
    by_language: dict[str, list[Score]] = {}
    for source, found in json.loads(held_out.read_text(encoding="utf-8")).items():
        if not found["texts"]:
            continue
        scores[source] = score(loaded, tokenizer, found["texts"])
        by_language.setdefault(found["language"], []).append(scores[source])
    return {language: _total(parts) for language, parts in by_language.items()} | scores


def _total(parts: Sequence[Score]) -> Score:
    return Score(sum(p.bits for p in parts), sum(p.characters for p in parts), sum(p.tokens for p in parts))


def load(model: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model in float32, and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(model)


def table(models: Sequence[Path], held_out: Path) -> str:
    """Bits per character of each model, by language and by source, in Markdown."""
    scores = {model: held_out_scores(model, held_out) for model in models}
    names = list(next(iter(scores.values())))
    lines = [f"| held-out text | characters | {' | '.join(model.name for model in models)} |"]
    lines.append("|---|---" + "|---" * len(models) + "|")
    for name in names:
        figures = " | ".join(f"{scores[model][name].per_character:.3f}" for model in models)
        lines.append(f"| {name} | {scores[models[0]][name].characters:,} | {figures} |")
    return "\n".join(lines)


def sentence_table(models: Sequence[Path], files: dict[str, Path]) -> str:
    """Bits per character of sentences, and the loss on their first and second reading, in Markdown."""
    lines = [
        "| sentences | model | bits per character | nats per token, read once | read again |",
        "|---|---|---|---|---|",
    ]
    for language, path in files.items():
        rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
        texts = list(dict.fromkeys(text for row in rows for text in row[:2]))[:SENTENCES]
        for model in models:
            loaded, tokenizer = load(model)
            once, again = second_reading(loaded, tokenizer, texts)
            bits = score(loaded, tokenizer, texts).per_character
            lines.append(f"| {language} | {model.name} | {bits:.3f} | {once:.2f} | {again:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--sentences", nargs="+", default=[], metavar="LANGUAGE=FILE")
    options = parser.parse_args()
    if options.held_out is None and not options.sentences:
        parser.error("give --held-out, --sentences or both.")
    files = {name: Path(path) for name, _, path in (pair.partition("=") for pair in options.sentences)}
    wanted = [path for path in (options.held_out, *files.values()) if path is not None]
    if missing := [str(path) for path in wanted if not path.is_file()]:
        parser.error(f"{', '.join(missing)} is not a file.")
    if options.held_out is not None:
        print(table(options.models, options.held_out))
    if files:
        print(sentence_table(options.models, files))


if __name__ == "__main__":
    main()
