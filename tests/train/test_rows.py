from __future__ import annotations

import json

import datasets
import pytest

from st_reba.train import read_conditional_pairs, read_scored_pairs, read_sentences, read_triplets


def write(tmp_path, name: str, text: str):
    path = tmp_path / name
    path.write_bytes(text.encode("utf-8"))
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.tsv", "a man\ta person\tno one\nice\twater\tfire\n"),
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
        (read_scored_pairs, "r.tsv", "a\tb\thigh\n", "line 1: score: 'high' is not a number. A row is sentence1,"),
        (read_scored_pairs, "r.tsv", "a\tb\tnan\n", "line 1: score: 'nan' is not a number."),
        (read_scored_pairs, "r.tsv", "a\tb\tinf\n", "line 1: score: 'inf' is not a number."),
        (
            read_conditional_pairs,
            "r.csv",
            'a,"b\nb",c,3\nd,e,f,-1\n',
            "line 3: score: '-1' is not a number from",
        ),
        (read_triplets, "r.csv", 'a,b,c\nd,"e\n', "line 2: unexpected end of data. A quotation mark may be missing."),
        (read_triplets, "r.jsonl", '{"anchor": "a", "positive": "b"}', "line 1 lacks negative (triplets); its columns"),
        (
            read_triplets,
            "r.jsonl",
            '{"anchor": "a", "positive": "b", "negative": "c"}\n{"anchor": "a", "positive": "b"}',
            "line 2 lacks negative (triplets); its columns are anchor, positive.",
        ),
        (read_triplets, "r.jsonl", "[1]", "line 1: [1] is JSON, but a line is a JSON object."),
        (read_triplets, "r.jsonl", "{", "line 1: not JSON"),
        (read_triplets, "r.parquet", "", "r.parquet is not a Parquet file ("),
        (read_triplets, "r.csv", "anchor,positive\na,b\n", "its columns are anchor, positive. Call them so."),
        (read_triplets, "r.tsv", "\n", "holds no rows. A row is anchor, positive, negative."),
    ],
)
def test_a_bad_row_is_named(reader, name, text, message, tmp_path):
    path = write(tmp_path, name, text)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        reader(path)
    assert str(path) in str(raised.value)
    assert message in str(raised.value)


def test_a_spreadsheet(tmp_path):
    path = tmp_path / "rows.xlsx"
    path.write_bytes(b"PK\x03\x04\x14\x00\x00\x00\x08\x00\xb1\xf2\x9c")
    with pytest.raises(ValueError, match=r"rows.xlsx, line 1: not UTF-8"):
        read_triplets(path)


def test_bytes_that_are_not_utf8(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_bytes(b"a\tb\tc\n\xff\tb\tc\n")
    with pytest.raises(ValueError, match="line 2: not UTF-8"):
        read_triplets(path)


class TestNamedDatasets:
    @pytest.fixture(autouse=True)
    def on_the_hub(self, monkeypatch):
        rows = {
            "id": [1, 2],
            "contradiction": ["no one", ""],
            "premise": ["a man", "ice"],
            "entailment": ["one", "water"],
        }
        splits = {
            name: datasets.Dataset.from_dict(rows).select(range(count)) for name, count in (("test", 2), ("train", 1))
        }

        def load_dataset(name, subset, split):
            assert (name, subset) == ("org/nli", None)
            return datasets.DatasetDict(splits) if split is None else splits[split]

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    def test_columns_are_found_and_ordered(self):
        assert read_triplets("org/nli").to_dict() == {
            "anchor": ["a man"], "positive": ["one"], "negative": ["no one"],
        }  # fmt: skip

    def test_a_bad_row_is_named(self):
        with pytest.raises(ValueError, match="org/nli, split test, row 2: negative: an empty text. A row is anchor"):
            read_triplets("org/nli::test")

    def test_missing_columns_are_named(self):
        with pytest.raises(ValueError, match=r"row 1 lacks sentence2, score \(pairs\); its columns are id, contra"):
            read_scored_pairs("org/nli")


def test_a_folder_with_splits(tmp_path):
    """Trained on is what a name calls train, unless a pattern asks for other files."""
    for split, word in (("train", "water"), ("test", "steam")):
        write(tmp_path, f"{split}.jsonl", json.dumps({"anchor": "ice", "positive": word, "negative": "fire"}))
    assert read_triplets(tmp_path)["positive"][:] == ["water"]
    assert read_triplets(f"{tmp_path}/test*")["positive"][:] == ["steam"]


def test_neither_a_file_nor_a_data_set():
    with pytest.raises(ValueError, match="'nothing/here' is no file or folder, and datasets cannot load it either"):
        read_triplets("nothing/here")
