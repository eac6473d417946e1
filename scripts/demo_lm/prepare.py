"""The demo LM's tokenizer, token stream and held-out text, from the training text (sources and licences: CARD.md).

    python scripts/demo_lm/prepare.py --corpus DIR --out DIR

``--out`` receives tokenizer.json and tokenizer_config.json, which the model directory needs, train.npy for train.py,
and held_out.json for held_out.py: one document in a hundred of each source, which neither tokenizer nor model sees.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from st_reba.files import durable

SEED = 0
VOCAB = 8192
MAX_TOKEN_LENGTH = 12
MAX_LENGTH = 2048  # context of the model, for tokenizer_config.json
END = "<|endoftext|>"  # id 0, both BOS and EOS
ENGLISH_FOR_TOKENIZER = 6000  # documents, so that the vocabulary stays mostly Chinese
PAIRS_PER_DOCUMENT = 20
HELD_OUT_PERCENT = 1
# Short texts whose copy follows them, so that the model learns to read its own repetition, as large models do.
REPEATED_PERCENT, REPEATED_CHARACTERS = 5, 400
BATCH = 2000

CHINESE, BILINGUAL, ENGLISH = "zh", "zh-en", "en"

# Chinese runs, Latin words, single digits, other symbols, white space
WORDS = r"[\u4e00-\u9fff]+| ?[A-Za-z]+| ?\d| ?[^\sA-Za-z\d\u4e00-\u9fff]+|\s+"


class Source(NamedTuple):
    """A file of text, how its documents are told apart, and how often the stream has them."""

    file: str
    language: str
    separator: str = "\n\n"
    times: int = 1


SOURCES = (
    Source("zh_lctt.txt.xz", CHINESE, times=2),
    Source("zh_cmrc2018_ctx.txt.xz", CHINESE, separator="\n", times=2),
    Source("tatoeba_zh_en.tsv.xz", BILINGUAL, separator="\n", times=4),
    Source("tinystories_4MB_lower.txt.xz", ENGLISH),
    Source("en_novels_sample.txt.xz", ENGLISH),
)


class Corpus(NamedTuple):
    """Documents by source, in the order of the files.

    Attributes:
        training: What tokenizer and model learn from.
        held_out: What they never see.
    """

    training: dict[Source, list[str]]
    held_out: dict[Source, list[str]]


def read_corpus(directory: Path) -> Corpus:
    """All sources, with one document in a hundred held out.

    A document is held out by what it says, not by where it stands, so that its copies are held out with it.

    Raises:
        FileNotFoundError: If a file is missing.
    """
    missing = [source.file for source in SOURCES if not (directory / source.file).is_file()]
    if missing:
        raise FileNotFoundError(f"{directory} has no {', '.join(missing)}: CARD.md lists the files and their sources.")
    corpus = Corpus({}, {})
    for source in SOURCES:
        found = _documents(directory / source.file, source)
        corpus.training[source] = [text for text in found if not is_held_out(text)]
        corpus.held_out[source] = [text for text in found if is_held_out(text)]
    return corpus


def is_held_out(text: str) -> bool:
    """Whether a document belongs to the held-out text."""
    return _share(text, "held out") < HELD_OUT_PERCENT / 100


def _share(text: str, purpose: str) -> float:
    """A number in [0, 1) that a text has for good."""
    digest = hashlib.sha256(f"{purpose}\0{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _documents(path: Path, source: Source) -> list[str]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        lines = file.read().split(source.separator)
    if source.language == BILINGUAL:
        return _of_pairs([line.split("\t") for line in lines if line])
    return [text for text in (line.strip() for line in lines) if len(text) > 20]


def _of_pairs(rows: list[list[str]]) -> list[str]:
    """Sentence pairs, each in a random order of languages, shuffled and gathered into documents."""
    rng = random.Random(SEED)
    pairs = [" ".join(row if rng.random() < 0.5 else row[::-1]) for row in rows]
    rng.shuffle(pairs)
    return ["\n".join(pairs[i : i + PAIRS_PER_DOCUMENT]) for i in range(0, len(pairs), PAIRS_PER_DOCUMENT)]


def train_tokenizer(corpus: Corpus, vocabulary: int) -> Tokenizer:
    """A byte-level BPE."""
    english = [text for source, texts in corpus.training.items() if source.language == ENGLISH for text in texts]
    other = [text for source, texts in corpus.training.items() if source.language != ENGLISH for text in texts]
    sample = random.Random(SEED).sample(english, min(len(english), ENGLISH_FOR_TOKENIZER))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        max_token_length=MAX_TOKEN_LENGTH,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(other + sample, trainer)
    return tokenizer


def repeated(text: str) -> str:
    """The text, and behind some of the short ones the text again."""
    if len(text) > REPEATED_CHARACTERS or _share(text, "repeated") >= REPEATED_PERCENT / 100:
        return text
    return f"{text}\n{text}"


def token_stream(tokenizer: Tokenizer, corpus: Corpus) -> np.ndarray:
    """All training documents in one shuffled stream of token ids, each closed by END."""
    texts = [repeated(text) for source, found in corpus.training.items() for text in found * source.times]
    random.Random(SEED).shuffle(texts)
    end = tokenizer.token_to_id(END)
    stream = []
    for i in range(0, len(texts), BATCH):
        stream += [np.array([*e.ids, end], dtype=np.uint16) for e in tokenizer.encode_batch(texts[i : i + BATCH])]
    return np.concatenate(stream)


def prepare(corpus_directory: Path, out: Path, vocabulary: int = VOCAB, start: Path | None = None) -> None:
    """Write tokenizer, stream and held-out text.

    Args:
        corpus_directory: Where the files of :data:`SOURCES` are.
        out: The directory to write.
        vocabulary: Tokens of a new tokenizer.
        start: A directory whose tokenizer.json is used instead of a new one.

    Raises:
        FileNotFoundError: If a file of the training text, or the tokenizer, is missing.
    """
    if start is not None and not (start / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{start} has no tokenizer.json: give the directory of the model to start from.")
    corpus = read_corpus(corpus_directory)
    if start is None:
        tokenizer = train_tokenizer(corpus, vocabulary)
    else:
        tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
    out.mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out)
    held_out = {source.file: {"language": source.language, "texts": texts} for source, texts in corpus.held_out.items()}
    (out / "held_out.json").write_text(json.dumps(held_out, ensure_ascii=False, indent=1), encoding="utf-8")
    stream = token_stream(tokenizer, corpus)
    # Last, and in one move: where it lies, the rest does too.
    with durable(out / "train.npy") as file:
        np.save(file, stream)
    print(f"{tokenizer.get_vocab_size()} tokens in the vocabulary, {len(stream):,} in the stream", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--corpus", type=Path, required=True, help=f"directory with {', '.join(s.file for s in SOURCES)}"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory for the tokenizer, train.npy, held_out.json")
    parser.add_argument("--start", type=Path, help="model directory whose tokenizer is used instead of a new one")
    options = parser.parse_args()
    try:
        prepare(options.corpus, options.out, start=options.start)
    except FileNotFoundError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
