"""Tables of one file, a folder, a URL or the Hub: which files are read, and what is in them."""

from __future__ import annotations

import csv
import functools
import gzip
import http.server
import io
import json
import os
import re
import threading
from pathlib import Path
from typing import ClassVar

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from st_reba.data.demo import demo_pairs, demo_questions, demo_retrieval, demo_sentences
from st_reba.data.sources import ALL, TO_MEASURE, TO_TRAIN, files_of, kind_of
from st_reba.data.tables import Classes, Pairs, Triplets, read_data, read_pairs, read_retrieval
from st_reba.evaluation import OddOneOutEvaluator
from st_reba_cli.load import texts_to_fit


def names(source, splits=TO_MEASURE):
    return [file.path.name for file in files_of(source, splits, Path("nothing/is/copied"))]


def make(directory, *files):
    for name in files:
        (directory / name).parent.mkdir(exist_ok=True, parents=True)
        (directory / name).write_text("a\tb\t1\nc\td\t2\n", encoding="utf-8")


KINDS_OF_FILES = [
    ("a.TSV", ("tsv", "")), ("a.csv.gz", ("csv", ".gz")), ("a.ndjson.zst", ("jsonl", ".zst")),
    ("a.b.parquet", ("parquet", "")), ("a.parquet.gz", ("", ".gz")), ("a", ("", "")), ("a.xlsx", ("", "")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), KINDS_OF_FILES)
def test_kinds(name, kind):
    assert kind_of(name) == kind


NOT_SHARDS = (".hidden.tsv", "_SUCCESS", "README.md", "more/part-1.tsv", "state.json")
WITHOUT_TEST = ("train-0.tsv", "train-1.tsv", "data_dev.tsv")
#: Some names have a split's word, perhaps by chance.
SOME_NAMED = ("a.txt", "test.txt", "my-train-notes.txt")


class TestFolders:
    FOLDERS = [
        # Numbers in names count.
        (("part-10.tsv", "part-9.tsv", *NOT_SHARDS), "", TO_MEASURE, ["part-9.tsv", "part-10.tsv"]),
        (WITHOUT_TEST, "", TO_MEASURE, ["data_dev.tsv"]),
        (WITHOUT_TEST, "", TO_TRAIN, ["train-0.tsv", "train-1.tsv"]),
        (WITHOUT_TEST, "train-*", TO_MEASURE, ["train-0.tsv", "train-1.tsv"]),
        (WITHOUT_TEST, "", ALL, ["data_dev.tsv", "train-0.tsv", "train-1.tsv"]),
        (SOME_NAMED, "", ALL, ["a.txt", "my-train-notes.txt", "test.txt"]),
    ]

    @pytest.mark.parametrize(("files", "pattern", "splits", "expected"), FOLDERS)
    def test_what_of_a_folder_is_read(self, files, pattern, splits, expected, tmp_path):
        make(tmp_path, *files)
        assert names(f"{tmp_path}/{pattern}", splits) == expected

    AMBIGUOUS = [
        (("a-test.tsv", "b-dev.tsv"), TO_TRAIN, r'test \(a-test.tsv\), validation \(b-dev.tsv\): give .* ".*/\*tr'),
        # To measure or to train on all of it might mix splits.
        (SOME_NAMED, TO_MEASURE, r"none in the name \(a.txt\), train \(my-train-notes.txt\), test"),
        (("a.tsv", "b.csv"), TO_MEASURE, "files of several kinds, csv, tsv: give one file, or a pattern"),
        ((), ALL, r"is a directory without a table in it \(nothing\): give a file"),
    ]

    @pytest.mark.parametrize(("files", "splits", "message"), AMBIGUOUS)
    def test_what_cannot_be_told(self, files, splits, message, tmp_path):
        make(tmp_path, *files)
        with pytest.raises(ValueError, match=message):
            names(tmp_path, splits)

    @pytest.mark.parametrize("source", ["no.tsv", "./no/such", "no-*.tsv", "no.csv.gz", "C:\\data\\pairs"])
    def test_missing(self, source, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(FileNotFoundError, match=r"there is no such file. Check the name|no file has such a name"):
            names(source)

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes that have a name")
    def test_a_pipe(self, tmp_path):
        os.mkfifo(tmp_path / "t.txt")
        with pytest.raises(ValueError, match="t.txt is a pipe or a device, which cannot be read twice"):
            read_data(tmp_path / "t.txt")


class TestRemote:
    def test_a_file_and_a_folder(self, memory):
        for name in ("x/part-2.tsv", "x/part-10.tsv", "x/notes.md"):
            memory.pipe(f"/{name}", f"{name}\tb\t1\nc\td\t2\n".encode())
        assert read_data("memory://x/part-2.tsv").first == ["x/part-2.tsv", "c"]
        for several in ("memory://x", "memory://x/part-*.tsv"):
            assert read_data(several).first == ["x/part-2.tsv", "c", "x/part-10.tsv", "c"]

    def test_what_was_copied_is_copied_again_if_it_changed(self, memory, tmp_path, monkeypatch):
        fetched = []
        real = type(memory).get_file
        monkeypatch.setattr(type(memory), "get_file", lambda self, *ends: fetched.append(ends) or real(self, *ends))
        for content in (b"one\tb\t1\n", b"two\tb\t1\n"):
            memory.pipe("/a.tsv", content)
            for _ in range(2):
                (file,) = files_of("memory://a.tsv", TO_MEASURE, tmp_path / "copy")
        assert len(fetched) == 2
        assert (file.path.read_bytes(), file.name) == (b"two\tb\t1\n", "memory://a.tsv")

    def test_refusals_name_what_the_user_named(self, memory):
        memory.pipe("/x/bad.tsv", b"a\tb\t1\nc\t2\n")
        with pytest.raises(ValueError, match="memory://x/bad.tsv, line 2: 2 columns where 3 are expected"):
            read_data("memory://x/bad.tsv")
        with pytest.raises(FileNotFoundError, match="memory://x/no.tsv: there is no such file"):
            read_data("memory://x/no.tsv")
        with pytest.raises(OSError, match="nonsense://x.tsv cannot be read \\(Protocol not known: nonsense"):
            read_data("nonsense://x.tsv")

    def test_http(self, tmp_path):
        pytest.importorskip("aiohttp", reason='fsspec reads http with it: pip install "st-reba[data]"')
        make(tmp_path, "pairs.tsv")

        class Quiet(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *args):
                pass

        handler = functools.partial(Quiet, directory=os.fspath(tmp_path))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            address = f"http://127.0.0.1:{server.server_address[1]}"
            assert read_data(f"{address}/pairs.tsv?download=1").second == ["b", "d"]
            with pytest.raises(FileNotFoundError, match="no.tsv: there is no such file"):
                read_data(f"{address}/no.tsv")
            server.shutdown()
        # Nobody listens there any more.
        with pytest.raises(OSError, match=r"/pairs.tsv cannot be read \(Cannot connect to host 127.0.0.1"):
            read_data(f"{address}/pairs.tsv")


def test_a_data_set_of_the_hub(monkeypatch):
    rows = datasets.Dataset.from_dict({"text1": ["a", "c"], "text2": ["b", "d"], "label": [1, 0]})
    loaded, told = [], []

    def load_dataset(name, subset, split):
        loaded.append((name, subset, split))
        return rows if split else datasets.DatasetDict({"train": rows, "validation": rows.select([1, 0])})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_data("org/name", tell=told.append).first == ["c", "a"], "validation before train"
    assert read_data("org/name:en:train").first == ["a", "c"]
    assert loaded == [("org/name", None, None), ("org/name", "en", "train")]
    assert told[0].startswith("org/name: 2 pairs in two classes")


ROWS = [("a cat, asleep", 'the "cat" sleeps', 5.0), ("one", "二", 1.5), ("three", "four", 0.0)]
PAIRS = Pairs(*map(list, zip(*ROWS, strict=True)))
NAMES = ("sentence1", "sentence2", "score")
LABELS = {"a cat, asleep": "animal", "一辆车": "vehicle", "a dog": "animal", "a bus": "vehicle"}


def as_tsv(rows, header=None):
    return "".join("\t".join(map(str, row)) + "\n" for row in [*([header] if header else []), *rows])


def as_csv(rows, header=NAMES):
    stream = io.StringIO()
    csv.writer(stream).writerows([*([header] if header else []), *rows])
    return stream.getvalue()


def as_jsonl(rows, header=NAMES):
    return "".join(json.dumps(dict(zip(header, row, strict=True)), ensure_ascii=False) + "\n" for row in rows)


def as_parquet(rows, header=NAMES):
    stream = io.BytesIO()
    pq.write_table(pa.table(dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))), stream)
    return stream.getvalue()


FORMATS = {"tsv": as_tsv, "csv": as_csv, "jsonl": as_jsonl, "parquet": as_parquet}


def written(directory, **content):
    """Files by name, and the path of the first, or of the folder that it lies in."""
    for name, text in content.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True, parents=True)
        data = text if isinstance(text, bytes) else text.encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return directory / next(iter(content)).split("/")[0]


#: One table as many files.
SAME = [
    {"pairs.tsv": as_tsv(ROWS)},
    {"pairs.csv": "\ufeff" + as_csv(ROWS, None)},
    *({f"pairs.{kind}": write(ROWS, NAMES)} for kind, write in FORMATS.items()),
    {"pairs.json": json.dumps([dict(zip(NAMES, row, strict=True)) for row in ROWS], indent=2)},
    {"pairs.json": "\n" + json.dumps([dict(zip(NAMES, row, strict=True)) for row in ROWS])},
    {"pairs.csv.gz": as_csv(ROWS)},
    {"shards/part-10.jsonl": as_jsonl(ROWS[2:]), "shards/part-9.jsonl": as_jsonl(ROWS[:2])},
    {"shards/1.csv.gz": as_csv(ROWS[:2]), "shards/2.csv.gz": as_csv(ROWS[2:])},
]


@pytest.mark.parametrize("content", SAME, ids=lambda content: next(iter(content)))
def test_one_table_in_many_files(content, tmp_path):
    path = written(tmp_path, **content)
    assert read_data(path) == read_pairs(path) == PAIRS


USED_NAMES = [
    (ROWS, ("Sentence1", " sentence 2", "Similarity-Score"), PAIRS, "3 pairs with scores from 0 to 5; columns: "),
    (ROWS, ("question1", "question2", "is_duplicate"), PAIRS, "3 pairs with"),
    (LABELS.items(), ("utterance", "Label-Text"), Classes(LABELS), "4 texts in 2 classes; columns: "),
    ([("a", "b", "c")], ("query", "positive", "hard neg"), Triplets(["a"], ["b"], ["c"]), "1 triplets; columns: "),
]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("rows", "titles", "expected", "noted"), USED_NAMES)
def test_names_that_others_use(rows, titles, expected, noted, kind, tmp_path):
    told = []
    turned = [("x", *row[::-1]) for row in rows]
    path = written(tmp_path, **{f"t.{kind}": FORMATS[kind](turned, ("id", *titles[::-1]))})
    assert read_data(path, tell=told.append) == expected
    assert told[0].startswith(f"{path}: {noted}")
    assert told[0].endswith("; not read: id.")


NAMED_COLUMNS = [
    ("a,b,c", as_csv(ROWS, ("a", "b", "c")), PAIRS),
    ("score=c, sentence1=a,sentence2=b", as_csv(ROWS, ("a", "b", "c")), PAIRS),
    ("2,3,1", as_csv([(score, first, second) for first, second, score in ROWS], None), PAIRS),
    ("text2,text1,score", as_csv([(row[1], row[0], row[2]) for row in ROWS], ("text1", "text2", "score")), PAIRS),
    ("a,b", as_csv(LABELS.items(), ("a", "b")), Classes(LABELS)),
    ("label=a,text=b", as_csv(LABELS.items(), ("b", "a")), Classes(LABELS)),
    ("1,2", as_csv(LABELS.items(), None), Classes(LABELS)),
    (None, as_csv(LABELS.items(), None), Classes(LABELS)),
    ("text", as_csv(LABELS.items(), ("text", "label")), list(LABELS)),
]


@pytest.mark.parametrize(("columns", "content", "expected"), NAMED_COLUMNS)
def test_columns_that_a_user_names(columns, content, expected, tmp_path):
    assert read_data(written(tmp_path, **{"t.csv": content}), columns) == expected


@pytest.mark.parametrize("columns", ["a,b,c,d", "score=a,sentence2=b", "sentence1=a,sentence2=b,points=c", "a=,b=,c="])
def test_columns_that_do_not_fit(columns, tmp_path):
    path = written(tmp_path, **{"t.csv": as_csv(ROWS, ("a", "b", "c"))})
    with pytest.raises(ValueError, match=r"give sentence1=...,sentence2=...,score=... \(pairs\) or anchor="):
        read_data(path, columns)
    with pytest.raises(ValueError, match='line 1: no column "x", but "a", "b", "c"'):
        read_data(path, "a,b,x")


SEMICOLONS = 'sentence1;sentence2;score\n"a; b";c;1\n"d";e;2\n'


SEPARATORS = [
    ("t.csv", SEMICOLONS, ";"), ("t.csv", "x, y|a|1\nz|b|0\n", "|"), ("t.csv", "x, y;a;0,8\nz;b;0,5\n", ";"),
    ("t.csv", "x;a;0,8\nz;b;0,5\n", ";"), ("t.tsv", as_csv(ROWS), ","),
    ("t.csv", ";x\n".join("abcdefghij") + ";x", ";"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "separator"), SEPARATORS)
def test_another_separator(name, content, separator, tmp_path):
    """It is refused by its name; to read it, it has to be given. What has decimal commas is refused, too."""
    path = written(tmp_path, **{name: content})
    said = re.escape(f't.{name[2:]}: columns are separated by "{separator}". Give --sep')
    with pytest.raises(ValueError, match=said):
        read_data(path)
    if ",8" in content:
        said = r"line 1: score: '0,8' has a comma\. Write decimals with a point, as in 0\.8"
        with pytest.raises(ValueError, match=said):
            read_data(path, separator=separator)
    elif content.startswith("a;"):
        assert read_data(path, separator=separator, scored=False) == list("abcdefghij")
    else:
        assert len(read_data(path, separator=separator)) >= 2


NO_SEPARATORS = [
    ("t.csv", "text,label\na;b;c,x\nd;e;f,x\ng;h;i,y\nj;k;l,y\n"), ("t.csv", "a,b;c,1\nb,c;d,2\n"),
    ("t.csv", 'text\n"a;b;c"\n"d;e;f"\n"g;h;i"\n'), ("t.tsv", "a, b, c\td\t1\na, b, c\te\t2\n"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content"), NO_SEPARATORS)
def test_what_separates_nothing(name, content, tmp_path):
    assert len(read_data(written(tmp_path, **{name: content}))) >= 2


@pytest.mark.parametrize(("name", "separator"), [("t.csv", ";;"), ("t.csv", '"'), ("t.csv", ""), ("t.jsonl", ",")])
def test_separators_that_are_none(name, separator, tmp_path):
    with pytest.raises(ValueError, match=f"{name}: --separator '.*' is for .csv and .tsv: one character, or tab"):
        read_data(written(tmp_path, **{name: "a"}), separator=separator)


def test_the_official_sts_benchmark(tmp_path):
    """Tabs in a .csv, quotation marks that quote nothing, and rows with sources at their ends."""
    rows = [("g", "f", "12", "1", 5.0, 'A "cat" sits.', "A, x."), ("g", "f", "12", "2", 1.0, '"a', "b, c", "s", "s")]
    told = []
    path = written(tmp_path, **{"sts.csv": as_tsv(rows)})
    assert read_data(path, "6,7,5", told.append) == Pairs(['A "cat" sits.', '"a'], ["A, x.", "b, c"], [5.0, 1.0])
    assert told[0].endswith("in this order: there is no header.")
    with pytest.raises(ValueError, match="sts.csv, line 2: 6 columns where 7 are expected"):
        read_data(written(tmp_path, **{"sts.csv": as_tsv([rows[0], rows[1][:6]])}), "6,7,5")
    with pytest.raises(ValueError, match="line 2: 4 columns where 3 are expected"):
        read_data(written(tmp_path, **{"t.csv": "a,b,1\nc,d,2,3\n"}))


def test_a_document_in_a_cell(tmp_path):
    """Longer than the csv module allows at first."""
    long = "word " * 100_000
    assert read_pairs(written(tmp_path, **{"t.csv": as_csv([(long, "b", 1), ("c", "d", 2)])})).first == [long, "c"]


def test_classes_of_inference_are_no_scores(tmp_path):
    names = ("premise", "hypothesis", "label")
    path = written(tmp_path, **{"t.csv": as_csv([(*row[:2], label) for label, row in enumerate(ROWS)], names)})
    with pytest.raises(ValueError, match="label seems to number the classes of .*--columns premise,hypothesis,label"):
        read_data(path)
    assert read_data(path, ",".join(names)).scores == [0, 1, 2]


def test_two_classes_and_texts(tmp_path):
    told = []
    classes = written(tmp_path, **{"c.csv": as_csv([(*row[:2], row[2] > 1) for row in ROWS])})
    found = read_data(classes, tell=told.append)
    assert (found.scores, found.two_classes) == ([1.0, 1.0, 0.0], True)
    texts = written(tmp_path, **{"x.csv": as_csv([("one", 1), ("two", 0), ("thr,ee", 1)], ("text", "date"))})
    assert read_data(texts, tell=told.append) == ["one", "two", "thr,ee"]
    # An empty line is none, and a blank around a text is none of it.
    lines = written(tmp_path, **{"x.txt": "\ufeff一个句子。\r\n\r\n  two, words \n \nthree\nthree"})
    assert read_data(lines, tell=told.append) == ["一个句子。", "two, words", "three", "three"]
    assert [line.partition(": ")[2] for line in told] == [
        "3 pairs in two classes, 2 similar (1) and 1 not (0); columns: sentence1, sentence2, score.",
        "3 plain texts, read without labels; columns: text; not read: date.",
        "4 plain texts, one a line.",
    ]


LABEL_VALUES = [
    ([0, 1, 0, 1], "0 1 0 1"), ([1.0, 2.0, 1.0, 2.0], "1 2 1 2"), ([0.5, 0.25, 0.5, 0.25], "0.5 0.25 0.5 0.25"),
    ([True, False, False, True], "true false false true"), (["", "x", "x", "y"], None), ([None, "x", "x", "y"], None),
    ([[1], [2], [1], [2]], None), ([float("nan"), 1.0, 1.0, 2.0], None),
]  # fmt: skip


@pytest.mark.parametrize(("labels", "read"), LABEL_VALUES)
def test_a_label_is_what_stands_there(labels, read, tmp_path):
    path = written(tmp_path, **{"t.parquet": as_parquet(zip("abcd", labels, strict=True), ("text", "label"))})
    if read is None:
        with pytest.raises(ValueError, match=r"t.parquet, row 1: label: .* is no label. A row is text, label."):
            read_data(path)
    else:
        assert list(read_data(path).labels.values()) == read.split()


def test_a_text_counts_once_with_its_first_label(tmp_path):
    told = []
    rows = [("a", "x"), ("b", "y"), ("a", "y"), ("c", "x"), ("a", "x"), ("d", "y"), ("e", "z")]
    path = written(tmp_path, **{"t.tsv": as_tsv(rows, ("text", "label"))})
    assert read_data(path, tell=told.append) == Classes({"a": "x", "b": "y", "c": "x", "d": "y"})
    assert read_data(path, scored=False) == texts_to_fit(str(path)) == [text for text, _ in rows]
    assert (
        "4 texts in 2 classes; left out, as repeated texts: 2, 1 with another label; "
        "left out, for no other text has their label: 1; columns: "
    ) in told[0]


def test_parts():
    data = Classes(LABELS)
    assert data.texts() == list(LABELS)
    assert data.items()[0] == ("a cat, asleep",)
    assert data.part([3, 0]) == Classes({"a bus": "vehicle", "a cat, asleep": "animal"})
    assert PAIRS.part([0, 1]).texts() == ["a cat, asleep", "one", 'the "cat" sleeps', "二"]


REFUSED = [
    ("t.csv", as_csv(ROWS, ("a", "b", "c")), "line 1: score: 'c' is not a number.* another order, give --colu"),
    ("t.csv", 'sentence1,sentence2\n"a",b\n', r"line 1 lacks score \(pairs\) or anchor, .*; its columns are sente"),
    ("t.csv", "sentence1,sentence2,score,score\na,b,1,2\n", 'line 1: several columns are called "score", in'),
    ("t.csv", 'a,"b\nb",1\nc,d\n', "t.csv, line 3: 2 columns where 3 are expected"),
    ("t.csv.gz", 'a,b,1\nc,"d,2\n', "t.csv.gz, line 2: unexpected end of data. A quotation mark may be missing"),
    ("t.jsonl", '{"text1": "a", "text2": "b", "score": 1}\n\n{"text1": "a", "score": 2}\n',
     r"t.jsonl, line 3 lacks sentence2 \(pairs\); its columns are text1, score. A row is sentence1"),
    ("t.jsonl", '{"text1": "a", "text2": "\\ud800", "score": 1}\n',
     "t.jsonl, line 1: sentence2: the text holds half of a surrogate pair, which is not a character. A row"),
    ("t.json", '[\n  {"sentence1": "a", "sentence2": "b", "score": 1},\n  {"sentence1": "a"}]',
     r"t.json, row 2 lacks sentence2, score \(pairs\)"),
    ("t.json", '{\n "data": []}', "t.json is one JSON document. Give an array of objects, or JSON lines."),
    ("t.parquet", as_parquet([("a", "b", 1.0), ("a", "", 2.0)]), "t.parquet, row 2: sentence2: an empty text"),
    ("s/2.csv", as_csv([("a", "b", "1_000")]), "s/2.csv, line 2: score: '1_000' is not a number"),
    ("t.txt", "sentence1,sentence2,score\na,b,1\n", r"line 1: names columns, .* End the name of the file in .csv"),
    ("t.xlsx", b"PK\x03\xff", r"t.xlsx has an unknown format. Give plain text \(.txt"),
    ("t.tsv", b"a\tb\t1\n\nc\t\xff\t2\n", "line 3: not UTF-8"),
    ("t.tsv", b"a\tb\t1\nc\td\t1\n", "all 2 pairs have one score"),
    ("t.tsv", b"a\tb\tc\td\n", "line 1: 4 columns, and no header that names them. A row is sentence1"),
    ("t.tsv", b"", "t.tsv holds no rows. A row is sentence1, sentence2, score; or anchor, positive, negative; or "
     "text, label; or text."),
    ("t.txt", b"\na\nb\nc\td\t1\n", "line 4: has a tab, and plain texts have none. If tabs separate columns, end"),
    ("t.txt", b"a\na\nb\n", r"t\.txt: 2 different texts. Give at least 3"),
    ("t.tsv", "text\tlabel\na\tx\nb\tx\n", "1 of 1 labels have two texts or more; two are needed. Pairs"),
    ("t.tsv", "a b\tc d\ne f\tg h\n", "0 of 2 labels have two texts or more; two are needed. Pairs need a third"),
    ("t.tsv", "comment\tmood\na\tx\nb\ty\nc\tx\n", 'line 1: no other text has the label "mood", so this line may na'
     "me the columns.*--columns TEXT,LABEL reads texts with labels"),
    ("t.csv", "review,label\na,x\nb,y\nc,x\n", r"csv, line 1 lacks .* text \(texts with labels\).* its columns are"
     r" review, label\..* give --columns with their names or, without"),
    ("t.csv", "q1,q 2,score\na,b,1\n", r"1 lacks sentence1, sentence2 .*their names or, without"),
    ("t.csv", "q1,q2,same\na,b,1\n", r"score: 'same' is not a number.*their names or,"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), REFUSED)
def test_refusals_name_file_and_line(name, content, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_data(written(tmp_path, **{name: content}))


class TestRetrieval:
    FILES: ClassVar = {
        "queries.jsonl": as_jsonl([("q1", "a?"), ("q2", "b?"), ("q3", "c?")], ("_id", "text")),
        "corpus.csv": as_csv([("d1", "A", "is a"), ("d2", "", "b")], ("_id", "title", "text")),
        "qrels.tsv": as_tsv([("q1", "d1", 2), ("q1", "d2", 0), ("q3", "d2", 1)], ("query-id", "corpus-id", "score")),
    }

    def sources(self, tmp_path, **changes):
        written(tmp_path, **(self.FILES | changes))
        return tmp_path / "queries.jsonl", tmp_path / "corpus.csv", tmp_path / "qrels.tsv"

    def test_the_layout_of_beir(self, tmp_path):
        told = []
        found = read_retrieval(*self.sources(tmp_path), tell=told.append)
        assert found.queries == {"q1": "a?", "q3": "c?"}
        assert found.documents == {"d1": "A is a", "d2": "b"}
        assert found.relevant == {"q1": ("d1",), "q3": ("d2",)}
        assert "qrels.tsv: 2 queries, 2 documents, 2 judged relevant; left out" in told[0]
        assert told[0].endswith(", without relevant documents: 1 of 3 queries.")
        assert read_data(tmp_path) == found
        assert (found.part([1]).queries, found.part([1]).documents) == ({"q3": "c?"}, found.documents)

    def test_a_title_that_the_first_document_lacks_and_a_judgement_that_is_taken_back(self, tmp_path):
        corpus = '{"_id": "d1", "text": "a"}\n{"_id": "d2", "title": "B", "text": "is b"}\n'
        qrels = "q1\td1\t1\nq1\td2\t1\nq1\td1\t0\n"
        queries, _, judged = self.sources(tmp_path, **{"corpus.jsonl": corpus, "qrels.tsv": qrels})
        found = read_retrieval(queries, tmp_path / "corpus.jsonl", judged)
        assert (found.documents, found.relevant) == ({"d1": "a", "d2": "B is b"}, {"q1": ("d2",)})

    def test_identifiers_that_pandas_wrote(self, tmp_path):
        """It makes 1.0 of 1 where another row of the column has none."""
        queries = as_jsonl([(1.0, "a?"), (2, "b?")], ("_id", "text"))
        qrels = as_jsonl([(1, "d1", 1), (2.0, "d2", 1)], ("query-id", "corpus-id", "score"))
        sources = self.sources(tmp_path, **{"queries.jsonl": queries, "qrels.jsonl": qrels})
        found = read_retrieval(*sources[:2], tmp_path / "qrels.jsonl")
        assert found.relevant == {"1": ("d1",), "2": ("d2",)}

    REFUSALS = [
        ({"qrels.tsv": "q1\td1\t1\nq1\td9\t1\n"}, 'qrels.tsv, line 2: there is no document "d9" in .*corpus.csv'),
        ({"qrels.tsv": "q9\td1\t1\n"}, 'qrels.tsv, line 1: there is no query "q9" in .*queries.jsonl'),
        ({"qrels.tsv": "q1\td1\t1\nq1\td1\t0\n"}, "qrels.tsv: no document is relevant, as no score is above 0"),
        ({"queries.jsonl": '{"_id": 1.5, "text": "a?"}'}, "line 1: _id: 1.5 is no identifier"),
        ({"corpus.csv": "_id,text\nd1,a\nd1,b\n"}, 'corpus.csv, line 3: "d1" is repeated'),
    ]

    @pytest.mark.parametrize(("changes", "message"), REFUSALS)
    def test_refusals(self, changes, message, tmp_path):
        with pytest.raises(ValueError, match=message):
            read_retrieval(*self.sources(tmp_path, **changes))


@pytest.mark.parametrize(("language", "count"), [("en", 40), ("zh", 20)])
def test_the_packages_own_are_what_the_pages_say(language, count):
    """Pairs, questions and a small retrieval set, in two languages."""
    pairs, found = read_pairs(demo_pairs(language)), read_data(demo_retrieval(language))
    for texts in (pairs.texts(), [*found.documents.values()], [*found.queries.values()]):
        assert len(set(texts)) == len(texts)
        assert all((re.search("[\u4e00-\u9fff]", text) is not None) == (language == "zh") for text in texts)
    assert (len(pairs), len(found.documents), len(found.queries)) == (200, 300, 60)
    # Spread over the whole scale, also in a few of them.
    assert set(pairs.scores) == {half / 2 for half in range(11)}
    assert all(len(set(map(round, pairs.scores[start : start + 40]))) == 6 for start in range(0, 200, 40))
    answers = [question.answer for question in OddOneOutEvaluator.from_csv(demo_questions(language)).questions]
    assert [answers.count(answer) for answer in range(4)] == [count // 4] * 4
    assert len(demo_sentences(language)) == 4 * count
