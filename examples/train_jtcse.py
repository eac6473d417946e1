"""Train JTCSE: two encoders, on texts without labels.

python examples/train_jtcse.py --base princeton-nlp/unsup-simcse-bert-base-uncased --texts texts.txt --out my-jtcse
python examples/train_jtcse.py --base ENCODER-1 --second ENCODER-2 --texts texts.txt --out my-jtcse

``--cross-every 0`` trains TNCSE. ``st-reba train jtcse`` does the same with a settings file. The same command resumes
an interrupted run.
"""

from __future__ import annotations

import argparse

from sentence_transformers import SentenceTransformer

from st_reba.train import JTCSETraining, train_jtcse

TEXTS = ["A man is playing the flute.", "Somebody makes music.", "The weather is nice today."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="tower I, such as a BERT or RoBERTa: a path or Hub id")
    parser.add_argument("--second", help="tower II, with the same tokenizer; default: a copy of tower I")
    parser.add_argument("--cross-every", type=int, default=2, help="cross-attention after every N layers")
    parser.add_argument("--texts", required=True, help="a .txt file with one text per line, or the name of a dataset")
    parser.add_argument("--out", required=True, help="directory of the run")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1.3e-6, help="higher for towers not trained with SimCSE")
    parser.add_argument("--max-steps", type=int, default=-1, help="default: one epoch")
    options = parser.parse_args()

    train_jtcse(
        JTCSETraining(
            model=options.base,
            second_model=options.second,
            cross_every=options.cross_every,
            texts=options.texts,
            arguments={
                "per_device_train_batch_size": options.batch_size,
                "learning_rate": options.learning_rate,
                "max_steps": options.max_steps,
            },
        ),
        options.out,
    )

    reloaded = SentenceTransformer(f"{options.out}/model")
    embeddings = reloaded.encode(TEXTS)
    print(f"Saved two towers to {options.out}; reloaded, they give {embeddings.shape}:")
    print(reloaded.similarity(embeddings, embeddings))


if __name__ == "__main__":
    main()
