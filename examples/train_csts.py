"""Train conditional similarity (C-STS): how similar two sentences are under a condition.

python examples/train_csts.py --base Qwen/Qwen3-0.6B --train csts_train.csv --dev csts_validation.csv --out qwen3-csts

The files have the columns sentence1, sentence2, condition and label, from 1 to 5, as princeton-nlp/c-sts on the Hub.
"""

from __future__ import annotations

import argparse

from datasets import Dataset
from peft import LoraConfig
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import CoSENTLoss
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from transformers import set_seed

from st_reba import BidirectionalLastLayer, in_context
from st_reba.evaluation import ConditionalSimilarityEvaluator
from st_reba.train import read_conditional_pairs


def conditioned(rows: Dataset) -> Dataset:
    """Return a dataset whose texts have individual prompts, in the form that the module accepts."""
    return Dataset.from_list([
        {
            "first": in_context(row["sentence1"], row["condition"]),
            "second": in_context(row["sentence2"], row["condition"]),
            "score": (row["score"] - 1) / 4,
        }
        for row in rows
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="decoder-only model: a path or Hub id")
    parser.add_argument("--train", required=True, help="a .csv, .tsv or .jsonl file, or the name of a dataset")
    parser.add_argument("--dev", required=True, help="evaluation data, as --train")
    parser.add_argument("--out", required=True, help="output directory of the adapter")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-steps", type=int, default=-1, help="default: three epochs")
    options = parser.parse_args()

    set_seed(42)
    module = BidirectionalLastLayer(options.base, template="csts")
    model = SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension(), "mean"), Normalize()])
    model.add_adapter(LoraConfig(r=32, lora_alpha=32, lora_dropout=0.1, target_modules="all-linear"))
    evaluator = ConditionalSimilarityEvaluator.from_rows(read_conditional_pairs(options.dev), write_csv=False)
    print("Before:", evaluator(model))
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=f"{options.out}-checkpoints",
            num_train_epochs=3,
            max_steps=options.max_steps,
            per_device_train_batch_size=options.batch_size,
            learning_rate=2e-4,
            seed=42,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=conditioned(read_conditional_pairs(options.train)),
        loss=CoSENTLoss(model),
    )
    trainer.train()
    print("After:", evaluator(model))
    model.save_pretrained(options.out)
    reloaded = SentenceTransformer(options.out)
    pair = [in_context("Two men play chess.", condition) for condition in ("the number of people", "the game")]
    print(f"Saved the adapter to {options.out}; one sentence under two conditions:")
    print(reloaded.similarity(*reloaded.encode(pair)))


if __name__ == "__main__":
    main()
