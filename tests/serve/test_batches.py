"""The queue: which texts share a batch, in whose turn, and who is refused."""

from __future__ import annotations

import threading
from concurrent.futures import wait

import pytest
from hypothesis import given
from hypothesis import strategies as st

from st_reba.serve.batches import Batches, ClosedError, FullError, Limits, Metrics


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
        if 1000 in items:
            return [2 * item for item in items][1:]
        return [2 * item for item in items]


@pytest.fixture
def made():
    """``made(**limits)``: a queue whose thread runs, and a model."""
    opened = []

    def make(**limits):
        batches, model = Batches(Limits(**limits), Metrics()), Model()
        # One object: what is the same is run together.
        model.way = model.run
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
    first = batches.submit(model.way, [0], [1])
    assert model.begun.wait(30)
    return first


@given(
    requests=st.lists(st.lists(st.integers(1, 50), max_size=8), max_size=6),
    tokens=st.integers(1, 100),
    texts=st.integers(1, 5),
)
def test_each_gets_its_own_in_its_order(requests, tokens, texts):
    batches, model = Batches(Limits(batch_tokens=tokens, batch_texts=texts), Metrics()), Model()
    way = model.run
    results = [batches.submit(way, items, items) for items in requests]
    batches.start()
    batches.close()
    assert [result.result(0) for result in results] == [[2 * item for item in items] for items in requests]
    for batch in model.batches:
        assert len(batch) <= texts
        assert len(batch) == 1 or max(batch) * len(batch) <= tokens


def test_requests_take_turns(made):
    batches, model = made(batch_texts=4)
    held(batches, model)
    many = batches.submit(model.way, [*range(100, 120)], [1] * 20)
    few = batches.submit(model.way, [1, 2], [1, 1])
    model.free.set()
    assert few.result(30) == [2, 4]
    assert model.batches[1] == [100, 1, 101, 2]
    assert many.result(30) == [*range(200, 240, 2)]


def test_kinds_take_turns(made):
    batches, model = made(batch_texts=2)
    other = Model()
    other_way = other.run
    held(batches, model)
    results = [batches.submit(model.way, [1, 2, 3, 4], [1] * 4), batches.submit(other_way, [5, 6, 7], [1] * 3)]
    model.free.set()
    wait(results, 30)
    assert (model.batches[1:], other.batches) == ([[1, 2], [3, 4]], [[5, 6], [7]])


def test_what_is_alike_in_length_runs_together(made):
    batches, model = made(batch_tokens=20)
    held(batches, model)
    result = batches.submit(model.way, [1, 9, 2, 10, 1], [1, 9, 2, 10, 1])
    model.free.set()
    assert result.result(30) == [2, 18, 4, 20, 2]
    assert model.batches[1:] == [[10, 9], [2, 1, 1]]


def test_a_full_queue_refuses_and_says_when(made):
    batches, model = made(queue_tokens=10)
    held(batches, model)
    # Whatever its size, one request is taken.
    batches.submit(model.way, [1], [11])
    with pytest.raises(FullError) as refused:
        batches.submit(model.way, [1], [1])
    assert 1 <= refused.value.seconds <= 60


def test_who_leaves_takes_his_texts_along(made):
    batches, model = made(queue_tokens=10)
    held(batches, model)
    left = batches.submit(model.way, [7] * 5, [2] * 5)
    assert left.cancel()
    stays = batches.submit(model.way, [1] * 10, [1] * 10)
    model.free.set()
    assert stays.result(30) == [2] * 10
    assert not any(7 in batch for batch in model.batches)


def test_who_leaves_while_his_batch_runs_leaves_the_others_theirs(made):
    batches, model = made()
    first = held(batches, model)
    assert first.cancel()
    model.free.set()
    assert batches.submit(model.way, [3], [1]).result(30) == [6]


def test_what_fails_fails_alone(made):
    batches, model = made()
    held(batches, model)
    results = [batches.submit(model.way, items, [1] * len(items)) for items in ([1, 2], [3, -1, 4], [5])]
    model.free.set()
    assert (results[0].result(30), results[2].result(30)) == ([2, 4], [10])
    with pytest.raises(ValueError, match="negative"):
        results[1].result(30)
    assert batches.running


def test_too_few_results_fail_that_request_alone(made):
    batches, model = made()
    held(batches, model)
    results = [batches.submit(model.way, items, [1] * len(items)) for items in ([1, 2], [3, 1000, 4], [5])]
    model.free.set()
    assert (results[0].result(5), results[2].result(5)) == ([2, 4], [10])
    with pytest.raises(ValueError, match="The model gave 0 results for 1 texts"):
        results[1].result(5)
    assert batches.submit(model.way, [6], [1]).result(5) == [12]
    assert batches.running


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit("a panic in tokenizers is no Exception either")])
def test_whatever_a_model_raises_the_thread_goes_on(made, error):
    batches, model = made()
    model.error = error
    with pytest.raises(RuntimeError, match=type(error).__name__):
        batches.submit(model.way, [-1], [1]).result(5)
    assert batches.submit(model.way, [6], [1]).result(5) == [12]


def test_what_is_tokenised_has_its_place_in_the_queue(made):
    batches, model = made(queue_tokens=10)
    with batches.reserved(100):  # Nothing waits.
        with pytest.raises(FullError), batches.reserved(1):
            pass
        with pytest.raises(FullError):
            batches.submit(model.way, [1], [1])
    with batches.reserved(4):
        assert batches.submit(model.way, [1], [1]).result(30) == [2]
    with pytest.raises(KeyError), batches.reserved(100):
        raise KeyError
    with batches.reserved(11):
        pass


def test_the_end_finishes_what_there_is(made):
    batches, model = made(batch_texts=1)
    held(batches, model)
    results = [batches.submit(model.way, [number], [1]) for number in range(5)]
    closing = threading.Thread(target=batches.close)
    closing.start()
    while batches.running:
        pass
    with pytest.raises(ClosedError):
        batches.submit(model.way, [1], [1])
    model.free.set()
    closing.join(30)
    assert [result.result(0) for result in results] == [[0], [2], [4], [6], [8]]


def test_nothing_is_something_at_once(made):
    batches, model = made()
    assert batches.submit(model.way, [], []).result(0) == []
