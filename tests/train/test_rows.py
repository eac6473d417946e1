from __future__ import annotations

import json

import datasets
import pytest

from st_reba.train import read_conditional_pairs, read_scored_pairs, read_sentences, read_triplets


def write(tmp_path, name: str, text: str):
    (tmp_path / name).write_bytes(text.encode("utf-8"))
    return tmp_path / name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.tsv", '\ufeffanchor\tpositive\tnegative\n\na man\ta person\tno one\r\nice\twater\tfire\n'),
        ("rows.csv", "sent0,sent1,hard_neg\na man,a person,no one\nice,water,fire\n"),
        ("rows.csv", "id,contradiction,premise,entailment\n1,no one,a man,a person\n2,fire,ice,water\n"),
        ("rows.jsonl", '{"premise": "a man", "entailment": "a person", "contradiction": "no one", "id": 1}\n'
                       '{"anchor": "ice", "positive": "water", "negative": "fire"}\n'),
    ],
)  # fmt: skip
def test_triplets(name, text, tmp_path):
    assert read_triplets(write(tmp_path, name, text)).to_dict() == {
        "anchor": ["a man", "ice"],
        "positive": ["a person", "water"],
        "negative": ["no one", "fire"],
    }


def test_pairs_conditions_and_sentences(tmp_path):
    assert read_scored_pairs(write(tmp_path, "pairs.tsv", "a\tb\t2.5\nc\td\t0\n"))["score"][:] == [2.5, 0.0]
    rows = 'sentence1,sentence2,condition,label\n"one, two",three,"a\ncondition",4\n'
    read = read_conditional_pairs(write(tmp_path, "csts.csv", rows))
    assert read[0] == {"sentence1": "one, two", "sentence2": "three", "condition": "a\ncondition", "score": 4.0}
    assert read_sentences(write(tmp_path, "texts.txt", "one\n\ntext\n")).to_dict() == {"sentence": ["one", "text"]}
    assert read_sentences(write(tmp_path, "texts.csv", "text,class\none,1\n")).to_dict() == {"sentence": ["one"]}


@pytest.mark.parametrize(
    ("reader", "name", "text", "message"),
    [
        (read_triplets, "r.tsv", "a\tb\tc\na\tb\n", "r.tsv, line 2: 2 columns where 3 are expected. A row is anchor,"),
        (read_triplets, "r.tsv", "a\tb\tc\n\na\t \tc\n", "line 3: positive: an empty text. A row is anchor, positive,"),
        (read_triplets, "r.jsonl", '{"anchor": "a", "positive": "b"}', "line 1 lacks negative (triplets); its columns"),
        (read_triplets, "r.csv", "anchor,positive\na,b\n", "its columns are anchor, positive. Call them so."),
        (read_triplets, "r.tsv", "\n", "holds no rows. A row is anchor, positive, negative."),
        (read_scored_pairs, "r.tsv", "a\tb\tnan\n", "line 1: score: 'nan' is not a number."),
        (read_conditional_pairs, "r.csv", 'a,"b\nb",c,3\nd,e,f,-1\n', "line 3: score: '-1' is not a number from"),
    ],
)
def test_a_bad_row_is_named(reader, name, text, message, tmp_path):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        reader(write(tmp_path, name, text))
    assert str(tmp_path / name) in str(raised.value)
    assert message in str(raised.value)


def test_a_data_set_of_the_hub(monkeypatch):
    rows = {
        "id": [1, 2], "contradiction": ["no one", ""], "premise": ["a man", "ice"], "entailment": ["one", "water"],
    }  # fmt: skip
    whole = datasets.Dataset.from_dict(rows)
    splits = datasets.DatasetDict({"test": whole, "train": whole.select([0])})

    def load_dataset(name, subset, split):
        assert (name, subset) == ("org/nli", None)
        return splits if split is None else splits[split]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    expected = {"anchor": ["a man"], "positive": ["one"], "negative": ["no one"]}
    assert read_triplets("org/nli").to_dict() == expected
    with pytest.raises(ValueError, match="org/nli, split test, row 2: negative: an empty text. A row is anchor"):
        read_triplets("org/nli::test")
    with pytest.raises(ValueError, match=r"row 1 lacks sentence2, score \(pairs\); its columns are id, contra"):
        read_scored_pairs("org/nli")


def test_a_folder_with_splits(tmp_path):
    """Trained on is what a name calls train, unless a pattern asks for other files."""
    for split, word in (("train", "water"), ("test", "steam")):
        write(tmp_path, f"{split}.jsonl", json.dumps({"anchor": "ice", "positive": word, "negative": "fire"}))
    assert read_triplets(tmp_path)["positive"][:] == ["water"]
    assert read_triplets(f"{tmp_path}/test*")["positive"][:] == ["steam"]
    with pytest.raises(ValueError, match="'nothing/here' is no file or folder, and datasets cannot load it either"):
        read_triplets("nothing/here")
