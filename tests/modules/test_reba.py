"""What ReBA has of its own, besides its oracle: pooling by columns, and chunks."""

from __future__ import annotations

import pytest
import torch

from st_reba import ReBAModule

from .. import oracles
from ..backbones import TEXTS
from ..conftest import pipeline, relative_error
from .methods import TOLERANCE, read


def test_mean_pooling_equals_the_sum_over_columns(shared, eager, token_ids):
    """Eq. 7: summing each column of A first gives the same mean."""
    ids = token_ids(TEXTS[2])
    with torch.no_grad():
        states, maps = oracles.run(eager(), ids * 2)
    weights = oracles.algorithm_1(maps)
    columns = torch.stack([weights[: min(len(ids), k + 1), k].sum() for k in range(2 * len(ids))])
    vector = pipeline(ReBAModule(shared())).encode(TEXTS[2])
    assert relative_error(vector, columns @ states / len(ids)) < TOLERANCE


class TestChunks:
    @pytest.mark.parametrize(("architecture", "length"), [("llama", 1), ("mistral_window", 8), ("bloom", 13)])
    def test_lengths(self, architecture, length, shared, eager, token_ids):
        ids = token_ids(TEXTS[2])
        assert length == 1 or len(ids) % length
        states = read(ReBAModule(shared(architecture), chunk_length=length), [TEXTS[3], TEXTS[2]])[1]
        with torch.no_grad():
            assert relative_error(states, oracles.chunked(eager(architecture), ids, 2, length)) < TOLERANCE

    @pytest.mark.parametrize(("architecture", "repetitions"), [("llama", 1), ("gpt_oss_sinks", 2), ("gpt_neo", 3)])
    @pytest.mark.filterwarnings("ignore:.*in its own code")
    def test_one_chunk_is_reba(self, architecture, repetitions, shared):
        """Beside longer texts, too."""
        whole, chunked = (
            pipeline(ReBAModule(shared(architecture), repetitions=repetitions, chunk_length=length)).encode(TEXTS)
            for length in (None, 12)
        )
        assert relative_error(chunked[3], whole[3]) < 1e-6
        assert relative_error(chunked[2], whole[2]) > 1e-3

    def test_words_see_the_text_before_their_chunk_and_not_behind_it(self, shared, token_ids):
        module = ReBAModule(shared(), chunk_length=5)
        words, shorter, other = read(module, [TEXTS[2], TEXTS[2][:-4], "The cat" + TEXTS[2][7:]])
        kept = 5 * (len(token_ids(TEXTS[2][:-4])) // 5)
        assert token_ids(TEXTS[2][:-4])[:kept] == token_ids(TEXTS[2])[:kept]
        assert relative_error(shorter[:kept], words[:kept]) < TOLERANCE
        assert relative_error(other[-5:], words[-5:]) > 1e-3
