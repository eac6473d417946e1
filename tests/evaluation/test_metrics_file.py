from __future__ import annotations

from st_reba.evaluation.metrics_file import append_metrics


def test_one_line_an_evaluation(tmp_path):
    path = append_metrics(tmp_path / "eval", "word_sense", "", 1, -1, {"accuracy": 0.5})
    append_metrics(tmp_path / "eval", "word_sense", "", 2, 10, {"accuracy": 0.75})
    assert path == tmp_path / "eval" / "word_sense_results.csv"
    assert path.read_text().splitlines() == ["epoch,steps,accuracy", "1,-1,0.5", "2,10,0.75"]


def test_each_name_has_its_own_file(tmp_path):
    assert append_metrics(tmp_path, "word_sense", "zh", -1, -1, {"a": 1}).name == "word_sense_zh_results.csv"
