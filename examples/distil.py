"""Distil a recipe that needs no training into one plain pass of the same model, a table, or any other embedder.

python examples/distil.py --model HuggingFaceTB/SmolLM2-135M-Instruct --texts corpus.txt --out distilled

``texts`` has one plain text a line, some thousands. ``st-reba distil`` does the same. Where a run was interrupted, the
same command goes on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sentence_transformers import SentenceTransformer

from st_reba.train import DistilTraining, train_distil

TEXTS = ["A man is playing the flute.", "Somebody makes music.", "A brown dog is jumping."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="any decoder-only model: a path or Hub id")
    parser.add_argument("--recipe", default="early-late", help="the teacher")
    parser.add_argument("--student", default="classical", help="a recipe's key, static, or a SentenceTransformer")
    parser.add_argument("--texts", required=True, help="a .txt file of plain texts, or a table with the column text")
    parser.add_argument("--out", required=True, help="directory of the run")
    parser.add_argument("--held-out", type=int, default=500, help="texts that nothing is trained on")
    parser.add_argument("--max-steps", type=int, default=-1, help="default: three passes over the texts")
    options = parser.parse_args()

    train_distil(
        DistilTraining(
            model=options.model,
            recipe=options.recipe,
            student=options.student,
            texts=options.texts,
            held_out=options.held_out,
            arguments={"max_steps": options.max_steps},
        ),
        options.out,
    )

    reached = json.loads((Path(options.out) / "distil.json").read_text())
    print(f"On texts that were held out: {reached['trained']}; before training {reached['at_the_start']}")
    reloaded = SentenceTransformer(f"{options.out}/model")
    print(reloaded.similarity(reloaded.encode(TEXTS), reloaded.encode(TEXTS)))


if __name__ == "__main__":
    main()
