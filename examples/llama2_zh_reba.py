"""Build, save and reload ReBA-2 on a Chinese Llama 2.

python examples/llama2_zh_reba.py --out llama2-zh-reba                   # LinkSoul/Chinese-Llama-2-7b, about 14 GB
python examples/llama2_zh_reba.py --base Qwen/Qwen3-0.6B --out qwen3-reba
python examples/llama2_zh_reba.py --out llama2-zh-reba --push org/llama2-zh-reba
"""

from __future__ import annotations

import argparse

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from st_reba import ReBAModule

TEXTS = ["我爱自然语言处理。", "我喜欢研究语言。", "今天的天气很好。"]


def build(base: str, dtype: str) -> SentenceTransformer:
    """Return ReBA-2 with last pooling, which computes e_n alone, at the cost of plain repetition."""
    reba = ReBAModule(base, repetitions=2, rows="last", model_kwargs={"dtype": dtype})
    return SentenceTransformer(modules=[reba, Pooling(reba.get_embedding_dimension(), "lasttoken"), Normalize()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="LinkSoul/Chinese-Llama-2-7b", help="decoder-only model: a path or Hub id")
    parser.add_argument("--out", required=True, help="output directory of the model")
    parser.add_argument("--dtype", default="auto", help="auto (that of the base model), float32, bfloat16 or float16")
    parser.add_argument("--push", metavar="ORG/NAME", help="also push the model to the Hub")
    options = parser.parse_args()

    model = build(options.base, options.dtype)
    embeddings = model.encode(TEXTS, convert_to_tensor=True)
    print(f"{options.base}: {tuple(embeddings.shape)}")
    print(model.similarity(embeddings, embeddings))

    model.save_pretrained(options.out)
    reloaded = SentenceTransformer(options.out)
    same = np.array_equal(reloaded.encode(TEXTS, convert_to_tensor=True).float().cpu(), embeddings.float().cpu())
    print(f"Saved to {options.out}; reloaded, it gives {'the same' if same else 'other'} embeddings.")
    if options.push:
        print(model.push_to_hub(options.push))


if __name__ == "__main__":
    main()
