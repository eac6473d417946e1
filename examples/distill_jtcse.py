"""JTCSE_D: distillation of two trained towers into one ordinary encoder, at half the cost.

python examples/distill_jtcse.py --teacher my-jtcse/model --student bert-base-uncased --texts texts.txt --out my-jtcse-d
"""

from __future__ import annotations

import argparse

from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.losses import MSELoss
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import set_seed

import st_reba  # noqa: F401  (registers the modules of the teacher)
from st_reba.train import read_sentences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="trained TwinTower: a path or Hub id")
    parser.add_argument("--student", required=True, help="encoder with the same hidden size: a path or Hub id")
    parser.add_argument("--texts", required=True, help="a .txt file with one text per line, or the name of a dataset")
    parser.add_argument("--out", required=True, help="output directory of the student")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--max-steps", type=int, default=-1, help="default: one epoch")
    options = parser.parse_args()

    set_seed(42)
    teacher = SentenceTransformer(options.teacher)
    encoder = Transformer(options.student, max_seq_length=teacher.max_seq_length)
    student = SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension(), "cls")])
    texts = read_sentences(options.texts)
    # The targets are the teacher's embeddings, sums of the CLS states of both towers.
    targets = teacher.encode(texts["sentence"])
    trainer = SentenceTransformerTrainer(
        model=student,
        args=SentenceTransformerTrainingArguments(
            output_dir=f"{options.out}-checkpoints",
            num_train_epochs=1,
            max_steps=options.max_steps,
            per_device_train_batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            seed=42,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=texts.add_column("label", targets.tolist()),
        loss=MSELoss(student),
    )
    trainer.train()
    student.save_pretrained(options.out)

    reloaded = SentenceTransformer(options.out)
    sample = texts["sentence"][:100]
    agreement = teacher.similarity_pairwise(teacher.encode(sample), reloaded.encode(sample)).mean()
    print(f"Saved one tower to {options.out}; its mean cosine to the two is {agreement:.3f}.")


if __name__ == "__main__":
    main()
