"""Build the demo LM's tokenizer and token stream from the training text (sources and licences: README.md).

    python prepare.py --corpus DIR --out DIR

--out receives tokenizer.json and tokenizer_config.json, which the model directory needs, and train.npy for train.py.
"""

from __future__ import annotations

import argparse
import lzma
import random
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SEED = 0
VOCAB = 8192
MAX_TOKEN_LENGTH = 12
MAX_LENGTH = 2048  # context of the model, for tokenizer_config.json
END = "<|endoftext|>"  # id 0, both BOS and EOS
ENGLISH_FOR_TOKENIZER = 6000  # documents, so that the vocabulary stays mostly Chinese
PAIRS_PER_DOCUMENT = 20
BATCH = 2000

LCTT = "zh_lctt.txt.xz"
CMRC = "zh_cmrc2018_ctx.txt.xz"
TATOEBA = "tatoeba_zh_en.tsv.xz"
STORIES = "tinystories_4MB_lower.txt.xz"
NOVELS = "en_novels_sample.txt.xz"
CORPUS_FILES = (LCTT, CMRC, TATOEBA, STORIES, NOVELS)

# Chinese runs, Latin words, single digits, other symbols, white space
WORDS = r"[\u4e00-\u9fff]+| ?[A-Za-z]+| ?\d| ?[^\sA-Za-z\d\u4e00-\u9fff]+|\s+"


def read(path: Path) -> str:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return file.read()


def documents(text: str, separator: str = "\n\n") -> list[str]:
    return [d.strip() for d in text.split(separator) if len(d.strip()) > 20]


def bilingual_documents(text: str, rng: random.Random) -> list[str]:
    """Sentence pairs, each in a random order of languages, shuffled and gathered into documents."""
    rows = [line.split("\t") for line in text.splitlines()]
    pairs = [" ".join(row if rng.random() < 0.5 else row[::-1]) for row in rows]
    rng.shuffle(pairs)
    return ["\n".join(pairs[i : i + PAIRS_PER_DOCUMENT]) for i in range(0, len(pairs), PAIRS_PER_DOCUMENT)]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        max_token_length=MAX_TOKEN_LENGTH,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts in one stream of token ids, each closed by END."""
    end = tokenizer.token_to_id(END)
    stream = []
    for i in range(0, len(texts), BATCH):
        stream += [np.array([*e.ids, end], dtype=np.uint16) for e in tokenizer.encode_batch(texts[i : i + BATCH])]
    return np.concatenate(stream)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the demo LM's tokenizer and token stream.")
    parser.add_argument("--corpus", type=Path, required=True, help=f"directory with {', '.join(CORPUS_FILES)}")
    parser.add_argument("--out", type=Path, required=True, help="directory for the tokenizer files and train.npy")
    args = parser.parse_args()
    missing = [name for name in CORPUS_FILES if not (args.corpus / name).is_file()]
    if missing:
        parser.error(
            f"no {', '.join(missing)} in {args.corpus}; README.md lists the five files of text and their sources"
        )

    # One generator for everything random, in this order: pairs, tokenizer sample, order of the texts.
    rng = random.Random(SEED)
    chinese = documents(read(args.corpus / LCTT)) + documents(read(args.corpus / CMRC), "\n")
    bilingual = bilingual_documents(read(args.corpus / TATOEBA), rng)
    english = documents(read(args.corpus / STORIES)) + documents(read(args.corpus / NOVELS))
    sample = rng.sample(english, min(len(english), ENGLISH_FOR_TOKENIZER))

    tokenizer = train_tokenizer(chinese + bilingual + sample)
    args.out.mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(args.out)

    texts = chinese * 2 + bilingual * 4 + english
    rng.shuffle(texts)
    stream = encode(tokenizer, texts)
    np.save(args.out / "train.npy", stream)
    print(f"{tokenizer.get_vocab_size()} tokens in the vocabulary, {len(stream)} in the stream")


if __name__ == "__main__":
    main()
