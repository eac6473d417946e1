from __future__ import annotations

import pytest
from sentence_transformers import SentenceTransformer
from torch import nn

from st_reba.evaluation.evaluator import Evaluator


class Half(Evaluator):
    metric = "half"
    file = "halves"


@pytest.mark.parametrize(("name", "file"), [("", "halves_results.csv"), ("zh", "halves_zh_results.csv")])
def test_one_line_an_evaluation(name, file, tmp_path):
    model = SentenceTransformer(modules=[nn.Identity()], device="cpu")
    evaluator = Half(name=name)
    for epoch, steps, value in ((1, -1, 0.5), (2, 10, 0.75)):
        found = evaluator.noted(model, {"half": value}, str(tmp_path / "eval"), epoch, steps)
    assert found == {evaluator.primary_metric: 0.75}
    lines = (tmp_path / "eval" / file).read_text().splitlines()
    assert lines == ["epoch,steps,half", "1,-1,0.5", "2,10,0.75"]
    Half(write_csv=False).noted(model, {"half": 1.0}, str(tmp_path / "none"), 1, 1)
    assert not (tmp_path / "none").exists()
