"""Train FREEZE: a similarity on the states of all layers of a frozen model.

python examples/train_freeze.py --base openai-community/gpt2-medium --pairs stsb_train.tsv --out gpt2-freeze

``pairs`` has lines of two texts and a score from 0 to 5, as the STS benchmark. The model reads the texts once and is
never trained. ``st-reba train freeze`` does the same with a settings file. The same command resumes an interrupted run.
"""

from __future__ import annotations

import argparse
from typing import cast

from sentence_transformers import SentenceTransformer

from st_reba import LayerwiseAutoencoder
from st_reba.train import FreezeTraining, train_freeze

FIRST = ["A man is playing the flute.", "A brown dog is jumping."]
SECOND = ["Somebody makes music.", "A brown dog is jumping."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="decoder-only model: a path or Hub id")
    parser.add_argument("--pairs", required=True, help="a .tsv, .csv or .jsonl file, or a dataset as NAME:SUBSET")
    parser.add_argument("--out", required=True, help="directory of the run")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-steps", type=int, default=-1, help="default: twelve epochs")
    options = parser.parse_args()

    train_freeze(
        FreezeTraining(
            model=options.base,
            pairs=options.pairs,
            arguments={"per_device_train_batch_size": options.batch_size, "max_steps": options.max_steps},
        ),
        options.out,
    )

    reloaded = SentenceTransformer(f"{options.out}/model")
    first, second = reloaded.encode(FIRST), reloaded.encode(SECOND)
    print(f"Saved to {options.out}; reloaded, its embeddings are {first.shape}, and their cosines")
    print(reloaded.similarity_pairwise(first, second))
    print("The trained similarity, 1 for equal texts:")
    print(cast(LayerwiseAutoencoder, reloaded[-1]).score_pairs(first, second))


if __name__ == "__main__":
    main()
