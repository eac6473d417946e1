from __future__ import annotations

import pytest
from sentence_transformers import SentenceTransformer
from torch import nn

from st_reba.evaluation.evaluator import TabulatedEvaluator


class Half(TabulatedEvaluator):
    metric = "half"
    file = "halves"
    value = 0.5

    def metrics_of(self, model):
        self.value += 0.25
        return {"half": self.value}


@pytest.mark.parametrize(("name", "file"), [("", "halves_results.csv"), ("zh", "halves_zh_results.csv")])
def test_one_line_an_evaluation(name, file, tmp_path):
    model = SentenceTransformer(modules=[nn.Identity()], device="cpu")
    evaluator = Half(name=name)
    evaluator(model, str(tmp_path / "eval"), 1)
    assert evaluator(model, str(tmp_path / "eval"), 2, 10) == {evaluator.primary_metric: 1.0}
    lines = (tmp_path / "eval" / file).read_text().splitlines()
    assert lines == ["epoch,steps,half", "1,-1,0.75", "2,10,1.0"]
    Half(write_csv=False)(model, str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
