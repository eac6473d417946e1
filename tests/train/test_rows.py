"""Rows to train on, by their columns; how each format is read is in tests/data."""

from __future__ import annotations

import datasets
import pytest

from st_reba.train import read_conditional_pairs, read_scored_pairs, read_sentences, read_triplets


def test_rows_by_their_columns(tmp_path):
    def write(name: str, text: str):
        (tmp_path / name).write_bytes(text.encode("utf-8"))
        return tmp_path / name

    triplets = read_triplets(write("nli.csv", "id,contradiction,premise,entailment\n1,no one,a man,a person\n"))
    assert triplets.to_dict() == {"anchor": ["a man"], "positive": ["a person"], "negative": ["no one"]}
    assert read_scored_pairs(write("pairs.tsv", "a\tb\t2.5\nc\td\t0\n"))["score"][:] == [2.5, 0.0]
    read = read_conditional_pairs(write("csts.csv", "sentence1,sentence2,condition,label\none,three,a condition,4\n"))
    assert read[0] == {"sentence1": "one", "sentence2": "three", "condition": "a condition", "score": 4.0}
    assert read_sentences(write("texts.txt", "one\n\ntext\n")).to_dict() == {"sentence": ["one", "text"]}
    assert read_sentences(write("texts.csv", "text,class\none,1\n")).to_dict() == {"sentence": ["one"]}
    with pytest.raises(ValueError, match=r"r.tsv, line 2: 2 columns where 3 are expected. A row is anchor, positive,"):
        read_triplets(write("r.tsv", "a\tb\tc\na\tb\n"))


def test_a_data_set_of_the_hub(monkeypatch):
    rows = {"contradiction": ["no one", ""], "premise": ["a man", "ice"], "entailment": ["one", "water"]}
    whole = datasets.Dataset.from_dict(rows)
    splits = datasets.DatasetDict({"test": whole, "train": whole.select([0])})
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, subset, split: splits if split is None else splits[split]
    )
    assert read_triplets("org/nli").to_dict() == {"anchor": ["a man"], "positive": ["one"], "negative": ["no one"]}
    with pytest.raises(ValueError, match="org/nli, split test, row 2: negative: an empty text. A row is anchor"):
        read_triplets("org/nli::test")
    with pytest.raises(ValueError, match=r"row 1 lacks sentence2, score \(pairs\); its columns are contradiction"):
        read_scored_pairs("org/nli")
