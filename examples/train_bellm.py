"""Train BeLLM: LoRA with a bidirectional last layer and hard negatives.

python examples/train_bellm.py --base Qwen/Qwen3-0.6B --triplets sentence-transformers/all-nli:triplet --out qwen3-bellm
python examples/train_bellm.py --base Qwen/Qwen3-0.6B --triplets nli.tsv --out qwen3-bellm

``st-reba train bellm`` does the same with a settings file. The same command resumes an interrupted run.
"""

from __future__ import annotations

import argparse

from sentence_transformers import SentenceTransformer

from st_reba.train import BeLLMTraining, train_bellm

TEXTS = ["A man is playing the flute.", "Somebody makes music.", "Nobody is playing anything."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="decoder-only model: a path or Hub id")
    parser.add_argument("--triplets", required=True, help="a .tsv, .csv or .jsonl file, or a dataset as NAME:SUBSET")
    parser.add_argument("--out", required=True, help="directory of the run")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-steps", type=int, default=-1, help="default: one epoch")
    options = parser.parse_args()

    train_bellm(
        BeLLMTraining(
            model=options.base,
            triplets=options.triplets,
            arguments={"per_device_train_batch_size": options.batch_size, "max_steps": options.max_steps},
        ),
        options.out,
    )

    reloaded = SentenceTransformer(f"{options.out}/model")
    embeddings = reloaded.encode(TEXTS)
    print(f"Saved the model and its adapter to {options.out}; reloaded, it gives {embeddings.shape}:")
    print(reloaded.similarity(embeddings, embeddings))


if __name__ == "__main__":
    main()
