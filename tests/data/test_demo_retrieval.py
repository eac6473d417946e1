from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ASSETS = Path(__file__).parents[2] / "st_reba" / "assets"
#: Words of an English document, characters of a Chinese one.
LENGTHS = {"en": (20, 80), "zh": (30, 150)}
QUERY_LENGTHS = {"en": (3, 15), "zh": (5, 20)}


def lines(path):
    return path.read_text(encoding="utf-8").splitlines()


def is_chinese(text):
    return any("\u4e00" <= character <= "\u9fff" for character in text)


def terms(text):
    """English words and pairs of neighbouring Chinese characters."""
    runs = re.findall(r"[\u4e00-\u9fff]+", text)
    return re.findall(r"[a-z0-9]+", text.lower()) + [run[i : i + 2] for run in runs for i in range(len(run) - 1)]


def discounted(gains):
    return sum(gain / math.log2(rank + 2) for rank, gain in enumerate(gains))


class Retrieval:
    def __init__(self, language):
        directory = ASSETS / f"demo_retrieval_{language}"
        self.language = language
        self.documents = [json.loads(line) for line in lines(directory / "corpus.jsonl")]
        self.queries = [json.loads(line) for line in lines(directory / "queries.jsonl")]
        self.header, *self.rows = [tuple(line.split("\t")) for line in lines(directory / "qrels.tsv")]
        self.judgements: dict[str, dict[str, int]] = defaultdict(dict)
        for query, document, score in self.rows:
            self.judgements[query][document] = int(score)

    def size(self, text):
        return len(text) if self.language == "zh" else len(text.split())


@pytest.fixture(params=["en", "zh"])
def retrieval(request):
    return Retrieval(request.param)


def test_the_layout_is_that_of_beir(retrieval):
    assert all(set(document) == {"_id", "title", "text"} for document in retrieval.documents)
    assert all(set(query) == {"_id", "text"} for query in retrieval.queries)
    assert retrieval.header == ("query-id", "corpus-id", "score")


def test_there_are_300_documents_and_60_queries_and_nothing_stands_twice(retrieval):
    for entries, count in ((retrieval.documents, 300), (retrieval.queries, 60)):
        assert len({entry["_id"] for entry in entries}) == len(entries) == count
        assert len({entry["text"] for entry in entries}) == count
    assert len({document["title"] for document in retrieval.documents}) == 300
    assert len({row[:2] for row in retrieval.rows}) == len(retrieval.rows)


def test_the_texts_are_short_and_in_one_language(retrieval):
    for entries, lengths in ((retrieval.documents, LENGTHS), (retrieval.queries, QUERY_LENGTHS)):
        low, high = lengths[retrieval.language]
        for entry in entries:
            text = entry["text"]
            assert low <= retrieval.size(text) <= high, text
            assert is_chinese(text) == (retrieval.language == "zh")
            assert text == text.strip()
    assert all(document["title"].strip() for document in retrieval.documents)


def test_half_of_the_queries_are_questions(retrieval):
    assert sum(query["text"][-1] in "?？" for query in retrieval.queries) == 30


def test_every_judgement_points_to_a_query_and_a_document(retrieval):
    assert set(retrieval.judgements) == {query["_id"] for query in retrieval.queries}
    documents = {document["_id"] for document in retrieval.documents}
    for scores in retrieval.judgements.values():
        assert set(scores) <= documents
        assert set(scores.values()) <= {1, 2}


def test_every_query_has_an_answer_and_few_relevant_documents(retrieval):
    for scores in retrieval.judgements.values():
        assert 2 in scores.values()
        assert 1 <= len(scores) <= 6


def test_shared_words_find_a_part_of_the_answers(retrieval):
    """nDCG@10 of tf-idf: neither so low that nothing can be found, nor so high that words are all it takes."""
    counts = {
        document["_id"]: Counter(terms(f"{document['title']} {document['text']}")) for document in retrieval.documents
    }
    frequencies = Counter(term for count in counts.values() for term in count)
    rarities = {term: math.log((1 + len(counts)) / (1 + frequency)) + 1 for term, frequency in frequencies.items()}
    norms = {
        name: math.hypot(*(number * rarities[term] for term, number in count.items())) for name, count in counts.items()
    }
    ndcgs = []
    for query in retrieval.queries:
        weights = {term: number * rarities.get(term, 0) for term, number in Counter(terms(query["text"])).items()}
        cosines = {
            name: sum(weight * count[term] * rarities.get(term, 0) for term, weight in weights.items()) / norms[name]
            for name, count in counts.items()
        }
        scores = retrieval.judgements[query["_id"]]
        found = sorted((name for name in cosines if cosines[name] > 0), key=lambda name: -cosines[name])[:10]
        best = discounted(sorted(scores.values(), reverse=True))
        ndcgs.append(discounted([scores.get(name, 0) for name in found]) / best)
    assert 0.5 < sum(ndcgs) / len(ndcgs) < 0.7
    assert sum(ndcg == 0 for ndcg in ndcgs) < 10
    assert sum(ndcg == 1 for ndcg in ndcgs) < 20
