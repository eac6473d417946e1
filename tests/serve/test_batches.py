"""The queue: which texts share a batch, in whose turn, and who is refused."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from st_reba.serve.requests import Batches, Limits, Metrics, RefusedError


class Model:
    """Doubles numbers, and can be held."""

    def __init__(self):
        self.batches = []
        self.error: BaseException = ValueError("negative")
        self.free = threading.Event()
        self.free.set()
        self.begun = threading.Event()

    def run(self, items):
        self.begun.set()
        assert self.free.wait(30)
        self.batches.append(list(items))
        if any(item < 0 for item in items):
            raise self.error
        return [2 * item for item in items][1000 in items :]


@pytest.fixture
def made():
    """``made(**limits)``: a queue whose thread runs, and a model."""
    opened = []

    def make(**limits):
        batches, model = Batches(Limits(**limits), Metrics()), Model()
        batches.start()
        opened.append((batches, model))
        return batches, model

    yield make
    for batches, model in opened:
        model.free.set()
        batches.close()


def held(batches, model):
    """A batch runs, and does not end."""
    model.free.clear()
    model.begun.clear()
    first = batches.submit(model.run, [0], [1])
    assert model.begun.wait(30)
    return first


@given(
    requests=st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=8), max_size=6),
    tokens=st.integers(1, 100),
    texts=st.integers(1, 5),
)
def test_each_gets_its_own_in_its_order(requests, tokens, texts):
    batches, model = Batches(Limits(batch_tokens=tokens, batch_texts=texts), Metrics()), Model()
    results = [batches.submit(model.run, items, items) for items in requests]
    batches.start()
    batches.close()
    assert [result.result(0) for result in results] == [[2 * item for item in items] for items in requests]
    for batch in model.batches:
        assert len(batch) <= texts
        assert len(batch) == 1 or max(batch) * len(batch) <= tokens


def test_requests_take_turns_and_so_do_kinds(made):
    batches, model = made(batch_texts=4)
    other = Model()
    held(batches, model)
    many = batches.submit(model.run, [*range(100, 112)], [1] * 12)
    few = batches.submit(model.run, [1, 2], [1, 1])
    others = batches.submit(other.run, [5, 6, 7], [1] * 3)
    order = []
    for result, name in ((many, "many"), (few, "few"), (others, "others")):
        result.add_done_callback(lambda _, name=name: order.append(name))
    model.free.set()
    assert many.result(30) == [*range(200, 224, 2)]
    assert (few.result(30), others.result(30)) == ([2, 4], [10, 12, 14])
    assert model.batches[1:] == [[100, 1, 101, 2], [102, 103, 104, 105], [106, 107, 108, 109], [110, 111]]
    assert order == ["few", "others", "many"]


def test_what_is_alike_in_length_runs_together(made):
    batches, model = made(batch_tokens=20)
    held(batches, model)
    result = batches.submit(model.run, [1, 9, 2, 10, 1], [1, 9, 2, 10, 1])
    model.free.set()
    assert result.result(30) == [2, 18, 4, 20, 2]
    assert model.batches[1:] == [[10, 9], [2, 1, 1]]


def test_who_leaves_takes_his_texts_along(made):
    batches, model = made()
    running = held(batches, model)
    left = batches.submit(model.run, [7] * 5, [2] * 5)
    assert batches.waiting() == (5, 0)
    assert left.cancel()
    assert batches.waiting() == (0, 0)
    stays = batches.submit(model.run, [1] * 10, [1] * 10)
    # He whose batch runs leaves the others theirs.
    assert running.cancel()
    model.free.set()
    assert stays.result(30) == [2] * 10
    assert not any(7 in batch for batch in model.batches)


@pytest.mark.parametrize(
    ("bad", "error", "said"),
    [
        (-1, ValueError("negative"), "ValueError"),
        (1000, None, "ValueError"),
        (-1, SystemExit(3), "SystemExit"),
        (-1, GeneratorExit("a panic in tokenizers is no Exception either"), "GeneratorExit"),
        (-1, RefusedError(500, "No number."), "No number."),
    ],
)
def test_what_fails_fails_alone_and_the_thread_goes_on(made, bad, error, said):
    """A result too few, too; whatever a model raises."""
    batches, model = made()
    model.error = error
    held(batches, model)
    results = [batches.submit(model.run, items, [1] * len(items)) for items in ([1, 2], [3, bad, 4], [5])]
    model.free.set()
    assert (results[0].result(5), results[2].result(5)) == ([2, 4], [10])
    with pytest.raises(RefusedError, match=said) as refused:
        results[1].result(5)
    assert refused.value.status == 500
    assert batches.submit(model.run, [6], [1]).result(5) == [12]
    assert batches.running
    assert batches.waiting() == (0, 0)


def test_the_end_finishes_what_there_is(made):
    batches, model = made(batch_texts=1)
    held(batches, model)
    results = [batches.submit(model.run, [number], [1]) for number in range(5)]
    closing = threading.Thread(target=batches.close)
    closing.start()
    while batches.running:
        pass
    with pytest.raises(RefusedError, match="is stopping"):
        batches.submit(model.run, [1], [1])
    model.free.set()
    closing.join(30)
    assert [result.result(0) for result in results] == [[0], [2], [4], [6], [8]]
