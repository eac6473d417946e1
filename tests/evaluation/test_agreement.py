from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from st_reba import CausalTransformer
from st_reba.evaluation import AgreementEvaluator
from st_reba.evaluation.agreement import agreement

from ..backbones import TEXTS
from ..conftest import pipeline


def test_it_is_what_two_loops_say():
    torch.manual_seed(0)
    first, second = (torch.nn.functional.normalize(torch.randn(14, 3), dim=-1) for _ in range(2))
    one, other = (vectors @ vectors.mT for vectors in (first, second))
    pairs = [(i, j) for i in range(14) for j in range(i)]
    order = spearmanr(*([float(cosines[pair]) for pair in pairs] for cosines in (one, other))).statistic
    shared = []
    for row in range(14):
        near = [
            set(sorted((j for j in range(14) if j != row), key=lambda j, own=cosines[row]: -own[j])[:10])
            for cosines in (one, other)
        ]
        shared.append(len(near[0] & near[1]) / 10)
    found = agreement(one, other)
    assert found["spearman_cosines"] == pytest.approx(order, abs=1e-6)
    assert found["shared_neighbours"] == pytest.approx(np.mean(shared))


def test_a_model_agrees_with_itself(backbone_path):
    model = pipeline(CausalTransformer(backbone_path()))
    vectors = model.encode(TEXTS, convert_to_tensor=True)
    evaluator = AgreementEvaluator(TEXTS, 3 * vectors, name="own")
    assert evaluator(model) == pytest.approx({"own_spearman_cosines": 1, "own_shared_neighbours": 1})
    assert evaluator.primary_metric == "own_spearman_cosines"
    with pytest.raises(ValueError, match="5 texts and 4 vectors were given"):
        AgreementEvaluator(TEXTS, vectors[:4])
