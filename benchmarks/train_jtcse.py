"""JTCSE, TNCSE and SimCSE on a small encoder that this script trains first, on texts without labels.

    python benchmarks/train_jtcse.py --data DIR --out build/jtcse          # about half an hour on one thread
    python benchmarks/train_jtcse.py --data DIR --out build/jtcse --start random --seeds 1 2

``DIR`` holds generic_sentences_en.txt (one a line) and stsb_en_{train,dev,test}.tsv (text, text, score), of whose
training set only the texts are used. The dev set makes the curve and chose the learning rate; the test set is read
once, at the end. What is done stays in ``--out`` and is not done again. Writes results-START.md and
results-START.json there.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import MSELoss, MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import BertWordPieceTokenizer
from torch.nn.functional import cross_entropy
from transformers import (  # type: ignore[attr-defined]
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    BertTokenizerFast,
    DataCollatorForLanguageModeling,
    get_linear_schedule_with_warmup,
    set_seed,
)
from transformers.utils import logging

from st_reba import TwinTower
from st_reba.data.tables import Pairs, read_pairs
from st_reba.evaluation import CLSEnergyEvaluator
from st_reba.evaluation.bootstrap import estimate, spearman
from st_reba.evaluation.geometry import alignment, uniformity
from st_reba.losses import JTCSELoss
from st_reba.training import fit

VOCABULARY = 6000
LENGTH = 48
SIZE: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
MLM: dict[str, Any] = {"epochs": 5, "batch_size": 32, "learning_rate": 1e-3, "seed": 0}
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 64,
    "weight_decay": 0.01,
    "eval_steps": 30,
    "logging_steps": 30,
}
#: A pair with at least this score is a positive of the alignment, as in SimCSE.
ALIKE = 4.0
#: The share of the learning rate that distillation needs to be as fast: its loss is a mean over dimensions.
DISTILLED = "JTCSE, distilled"


def unlabelled(data: Path) -> list[str]:
    """Every text once, in the order of the files."""
    lines = (data / "generic_sentences_en.txt").read_text(encoding="utf-8").splitlines()
    pairs = (data / "stsb_en_train.tsv").read_text(encoding="utf-8").splitlines()
    lines += [text for line in pairs for text in line.split("\t")[:2]]
    return list(dict.fromkeys(line.strip() for line in lines if line.strip()))


def make_encoder(texts: list[str], out: Path) -> None:
    """A BERT with a tokenizer of its own, trained to fill in masked tokens."""
    wordpiece = BertWordPieceTokenizer(lowercase=True)
    wordpiece.train_from_iterator(texts, vocab_size=VOCABULARY, show_progress=False)
    (out / "tokenizer").mkdir(parents=True, exist_ok=True)
    wordpiece.save_model(str(out / "tokenizer"))
    tokenizer = BertTokenizerFast(vocab=str(out / "tokenizer" / "vocab.txt"), model_max_length=LENGTH)
    set_seed(MLM["seed"])
    model = BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=128, **SIZE))
    AutoModel.from_config(model.config).save_pretrained(out / "random")
    tokenizer.save_pretrained(out / "random")
    collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    ids = sorted((tokenizer(text, truncation=True)["input_ids"] for text in texts), key=len)
    batches = [ids[first : first + MLM["batch_size"]] for first in range(0, len(ids), MLM["batch_size"])]
    order = [int(place) for _ in range(MLM["epochs"]) for place in torch.randperm(len(batches))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=MLM["learning_rate"], weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(optimizer, len(order) // 10, len(order))
    model.train()
    for step, place in enumerate(order):
        batch = collate([{"input_ids": row} for row in batches[place]])
        masked = batch.pop("labels")
        states = model.bert(**batch).last_hidden_state
        # Logits of the masked tokens alone: those of all would cost more than the layers.
        loss = cross_entropy(model.cls(states[masked >= 0]), masked[masked >= 0])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step + 1 == len(order):
            print(f"masked language model: step {step + 1} of {len(order)}, loss {loss.item():.3f}", flush=True)
    # The pooler that a masked language model does not have is drawn here, once for all.
    encoder = AutoModel.from_config(model.config)
    encoder.load_state_dict(model.bert.state_dict(), strict=False)
    encoder.save_pretrained(out / "encoder")
    tokenizer.save_pretrained(out / "encoder")


def twins(encoder: Path, cross_every: int = 2) -> SentenceTransformer:
    towers = TwinTower(str(encoder), cross_every=cross_every)
    return SentenceTransformer(modules=[towers, Pooling(towers.get_embedding_dimension(), "cls")], device="cpu")


def single(encoder: Path) -> SentenceTransformer:
    tower = Transformer(str(encoder))
    return SentenceTransformer(modules=[tower, Pooling(tower.get_embedding_dimension(), "cls")], device="cpu")


Method = tuple[Callable[[Path], SentenceTransformer], Callable[[SentenceTransformer, int], torch.nn.Module]]

METHODS: dict[str, Method] = {
    "SimCSE, one tower": (single, lambda model, seed: MultipleNegativesRankingLoss(model, scale=20.0)),
    "InfoNCE alone, two towers": (
        lambda encoder: twins(encoder, 0),
        lambda model, seed: JTCSELoss(model, interaction_weight=0, modulus_weight=0, seed=seed),
    ),
    "TNCSE": (lambda encoder: twins(encoder, 0), lambda model, seed: JTCSELoss(model, seed=seed)),
    "JTCSE": (twins, lambda model, seed: JTCSELoss(model, seed=seed)),
}


#: What runs unless ``--methods`` says otherwise.
DEFAULT = ("SimCSE, one tower", "TNCSE", "JTCSE")


def dev_evaluator(pairs: Pairs) -> EmbeddingSimilarityEvaluator:
    return EmbeddingSimilarityEvaluator(
        pairs.first, pairs.second, pairs.scores, main_similarity="cosine", name="dev", write_csv=False, batch_size=128
    )


def train(
    model: SentenceTransformer, rows: Dataset, loss: torch.nn.Module, options: argparse.Namespace, seed: int, out: Path
) -> None:
    """Train, and keep the model and the curve in ``out``; do nothing where they are."""
    started = time.process_time()
    chosen = {"max_steps": options.steps, "learning_rate": options.learning_rate, "save_steps": options.steps}
    fitted = fit(
        model, rows, loss, output=out, arguments={**ARGUMENTS, **chosen, "seed": seed}, progress=False,
        evaluator=dev_evaluator(options.dev),
    )  # fmt: skip
    curve = {
        "minutes": (time.process_time() - started) / 60,
        "loss": fitted.losses,
        "dev": [(entry["step"], entry["eval_dev_spearman_cosine"]) for entry in fitted.log
                if "eval_dev_spearman_cosine" in entry],
    }  # fmt: skip
    model.save_pretrained(str(out / "model"))
    (out / "curve.json").write_text(json.dumps(curve), encoding="utf-8")


def run(name: str, seed: int, texts: list[str], options: argparse.Namespace) -> Path:
    """A trained model's directory."""
    label = f"{name.replace(',', '').replace(' ', '-')}-{seed}-{options.steps}-{options.learning_rate:g}"
    out = options.out / options.start / label
    if (out / "curve.json").is_file():
        return out
    print(f"{name}, seed {seed}", flush=True)
    if name == DISTILLED:
        teacher = SentenceTransformer(str(run("JTCSE", seed, texts, options) / "model"), device="cpu")
        model = single(options.out / options.start)
        rows = Dataset.from_dict({"sentence": texts, "label": teacher.encode(texts, batch_size=128).tolist()})
        loss: torch.nn.Module = MSELoss(model)
    else:
        make_model, make_loss = METHODS[name]
        model = make_model(options.out / options.start)
        columns = {"anchor": texts, "positive": texts} if name.startswith("SimCSE") else {"sentence": texts}
        rows, loss = Dataset.from_dict(columns), make_loss(model, seed)
    train(model, rows, loss, options, seed, out)
    return out


class BagOfEmbeddings:
    """The control: the mean of a text's input embeddings."""

    def __init__(self, encoder: Path) -> None:
        self.tower = Transformer(str(encoder))

    def encode(self, texts: list[str], **kwargs: object) -> np.ndarray:
        table = self.tower.model.get_input_embeddings().weight.detach()
        ids = self.tower.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return np.stack([table[row].mean(dim=0).numpy() for row in ids])


def measure(model: SentenceTransformer | BagOfEmbeddings, pairs: Pairs) -> dict[str, Any]:
    """Cosines of the pairs, and how the embeddings lie."""
    first, second = (model.encode(texts, batch_size=128) for texts in (pairs.first, pairs.second))
    cosines = (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
    alike = np.asarray(pairs.scores) >= ALIKE
    distinct = dict(zip([*pairs.first, *pairs.second], [*first, *second], strict=True))
    found: dict[str, Any] = {
        "cosines": cosines,
        "alignment": float(alignment(first[alike], second[alike]).mean()),
        "uniformity": float(uniformity(np.stack(list(distinct.values()))).mean()),
        "cls_energy": float("nan"),
    }
    if isinstance(model, SentenceTransformer):
        found["cls_energy"] = CLSEnergyEvaluator(list(distinct), batch_size=128)(model)["cls_energy"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the files named above")
    parser.add_argument("--out", type=Path, required=True, help="directory for models, curves and results")
    parser.add_argument("--start", choices=["encoder", "random"], default="encoder", help="trained here first, or not")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--steps", type=int, default=120, help="of each method, 64 texts a step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--methods", nargs="+", default=[*DEFAULT, DISTILLED], choices=[*METHODS, DISTILLED])
    parser.add_argument("--no-test", action="store_true", help="stop before the test set: to choose on the dev set")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    texts = unlabelled(options.data)
    options.dev = read_pairs(options.data / "stsb_en_dev.tsv")
    print(f"{len(texts)} texts", flush=True)
    if not (options.out / "encoder" / "model.safetensors").is_file():
        make_encoder(texts, options.out)
    before = dev_evaluator(options.dev)(single(options.out / options.start))["dev_spearman_cosine"]
    print(f"before: dev {100 * before:.2f}", flush=True)
    trained = {(name, seed): run(name, seed, texts, options) for name in options.methods for seed in options.seeds}
    for (name, seed), out in trained.items():
        curve = json.loads((out / "curve.json").read_text())
        best = max(score for _, score in curve["dev"])
        print(f"{name}, seed {seed}: dev {100 * curve['dev'][-1][1]:.2f}, at best {100 * best:.2f}", flush=True)
    if not options.no_test:
        report(trained, options)


def report(trained: dict[tuple[str, int], Path], options: argparse.Namespace) -> None:
    """Scores on the test set with intervals, and the curves, as Markdown and JSON."""
    test = read_pairs(options.data / "stsb_en_test.tsv")
    start = options.out / options.start
    models: dict[str, Callable[[], SentenceTransformer | BagOfEmbeddings]] = {
        "bag of input embeddings": lambda: BagOfEmbeddings(start),
        "random weights, CLS": lambda: single(options.out / "random"),
        "before: CLS": lambda: single(start),
    }
    for (name, seed), out in trained.items():
        models[f"{name} (seed {seed})"] = partial(SentenceTransformer, str(out / "model"), device="cpu")
    found = {name: measure(make(), test) for name, make in models.items()}
    scores = estimate(
        spearman({name: row["cosines"] for name, row in found.items()}, test.scores), controls=[*models][:3]
    )
    lines = ["| | STS-B test, Spearman x 100 | alignment | uniformity | CLS energy |", "|---|---|---|---|---|"]
    for name, row in found.items():
        score = scores[name]
        tied = " =" if score.tied else ""
        lines.append(
            f"| {name} | {100 * score.value:.1f} [{100 * score.low:.1f}, {100 * score.high:.1f}]{tied} | "
            f"{row['alignment']:.3f} | {row['uniformity']:.3f} | {row['cls_energy']:.3f} |"
        )
    curves = {key: json.loads((out / "curve.json").read_text()) for key, out in trained.items()}
    lines += ["", "| step | " + " | ".join(f"{name} ({seed}): loss, dev" for name, seed in curves) + " |"]
    lines.append("|---|" + "---|" * len(curves))
    for step, _ in next(iter(curves.values()))["dev"]:
        cells = [f"{dict(c['loss']).get(step, float('nan')):.3f}, {100 * dict(c['dev'])[step]:.1f}"
                 for c in curves.values()]  # fmt: skip
        lines.append(f"| {step} | " + " | ".join(cells) + " |")
    minutes = ", ".join(f"{name} ({seed}) {curve['minutes']:.1f}" for (name, seed), curve in curves.items())
    lines += ["", f"CPU minutes: {minutes}."]
    (options.out / f"results-{options.start}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    kept = {name: {key: value for key, value in row.items() if key != "cosines"} for name, row in found.items()}
    (options.out / f"results-{options.start}.json").write_text(json.dumps(kept, indent=2), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
