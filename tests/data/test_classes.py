"""Texts with a label each, as tables have them."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from st_reba.data.columns import CLASSES
from st_reba.data.tables import Classes, Pairs, read_data, read_texts
from st_reba_cli.load import texts_to_fit

LABELS = {"a cat, asleep": "animal", "一辆车": "vehicle", "a dog": "animal", "a bus": "vehicle"}


def table(path, rows):
    """A table of any kind, whose first row names its columns."""
    names, *rows = rows
    if path.suffix == ".parquet":
        pq.write_table(pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    else:
        cells = [names, *rows] if names else rows
        path.write_text("".join("\t".join(map(str, row)) + "\n" for row in cells), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["t.tsv", "t.jsonl", "t.parquet"])
@pytest.mark.parametrize("titles", [("text", "label"), ("Sentence", "Label-Text"), ("utterance", "intent")])
def test_names_that_others_use(name, titles, tmp_path):
    told = []
    rows = [(place, label, text) for place, (text, label) in enumerate(LABELS.items())]
    path = table(tmp_path / name, [("id", *titles[::-1]), *rows])
    assert read_data(path, tell=told.append) == Classes(LABELS)
    assert told[0].startswith(f"{path}: 4 texts in 2 classes; columns: ")
    assert told[0].endswith("; not read: id.")


@pytest.mark.parametrize(
    ("titles", "columns"), [(("a", "b"), "a,b"), (("b", "a"), "label=a,text=b"), ((), None), ((), "1,2")]
)
def test_columns_of_other_names_or_none(titles, columns, tmp_path):
    assert read_data(table(tmp_path / "t.tsv", [titles, *LABELS.items()]), columns) == Classes(LABELS)


@pytest.mark.parametrize(
    ("labels", "read"),
    [([0, 1, 0, 1], "0 1 0 1"), ([1.0, 2.0, 1.0, 2.0], "1 2 1 2"), ([0.5, 0.25, 0.5, 0.25], "0.5 0.25 0.5 0.25"),
     ([True, False, False, True], "true false false true"), (["", "x", "x", "y"], None), ([None, "x", "x", "y"], None),
     ([[1], [2], [1], [2]], None), ([float("nan"), 1.0, 1.0, 2.0], None)],
)  # fmt: skip
def test_a_label_is_what_stands_there(labels, read, tmp_path):
    path = table(tmp_path / "t.parquet", [("text", "label"), *zip("abcd", labels, strict=True)])
    if read is None:
        with pytest.raises(ValueError, match=r"t.parquet, row 1: label: .* is no label. A row is text, label."):
            read_data(path)
    else:
        assert list(read_data(path).labels.values()) == read.split()


def test_what_is_none_of_it(tmp_path):
    """Beside two texts a label is a score; a text alone is plain; and a user may want the texts alone."""
    pairs = table(tmp_path / "p.tsv", [("text1", "text2", "label"), ("a", "b", 1), ("c", "d", 0)])
    assert isinstance(read_data(pairs), Pairs)
    plain = table(tmp_path / "t.tsv", [("text", "date"), ("a", 1), ("b", 2), ("c", 1)])
    assert read_data(plain) == ["a", "b", "c"]
    labelled = table(tmp_path / "l.tsv", [("text", "label"), ("a", 1), ("b", 2), ("c", 1)])
    assert read_data(labelled, "text") == read_texts(labelled) == ["a", "b", "c"]


def test_a_text_counts_once_with_its_first_label(tmp_path):
    told = []
    rows = [("a", "x"), ("b", "y"), ("a", "y"), ("c", "x"), ("a", "x"), ("d", "y"), ("e", "z")]
    path = table(tmp_path / "t.tsv", [("text", "label"), *rows])
    assert read_data(path, tell=told.append) == Classes({"a": "x", "b": "y", "c": "x", "d": "y"})
    assert (
        "4 texts in 2 classes; left out, for the same text stands before: 2, 1 with another label; "
        "left out, for no other text has their label: 1; columns: "
    ) in told[0]


def test_where_only_texts_count_any_labels_will_do(tmp_path):
    path = table(tmp_path / "t.tsv", [("text", "label"), ("a", "x"), ("b", "x"), ("c", "x")])
    assert read_data(path, scored=False) == texts_to_fit(str(path)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([("text", "label"), ("a", "x"), ("b", "x")], 'all texts have the label "x"; two classes are needed. Two col'),
        ([("text", "label"), ("a", "x"), ("b", "y")], "labels that two texts or more have: 0 of 2; two are needed."),
        ([("text", "label"), ("a", "x"), ("b", "x"), ("c", "y")], "two texts or more have: 1 of 2; two are needed"),
        ([(), ("a b", "c d"), ("e f", "g h")], "0 of 2; two are needed. Two columns are a text and its label; pairs "
         "have a third one, their score. --columns 1,2 says which is the"),
        ([("comment", "mood"), ("a", "x"), ("b", "y"), ("c", "x")],
         't.tsv, line 1: no other text has the label "mood". Does this line name the columns?'),
        ([("comment", "label", "text1"), ("a", "x", "b")], f"t.tsv, line 1 lacks .* {CLASSES.in_words[:40]}"),
    ],
)  # fmt: skip
def test_refusals(rows, said, tmp_path):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        read_data(table(tmp_path / "t.tsv", rows))


def test_parts():
    data = Classes(LABELS)
    assert data.texts() == list(LABELS)
    assert data.items()[0] == ("a cat, asleep",)
    assert data.part([3, 0]) == Classes({"a bus": "vehicle", "a cat, asleep": "animal"})
    assert data.head(2).in_words == "2 texts in 2 classes"
