from __future__ import annotations

import csv
import dataclasses
import re
from html import unescape

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from typer.testing import CliRunner

from st_reba import __version__
from st_reba import compare as room
from st_reba.compare.results import Comparison
from st_reba.compare.search import candidates
from st_reba.data.demo import demo_pairs, demo_sentences
from st_reba.data.tables import read_pairs
from st_reba.evaluation import OddOneOutEvaluator
from st_reba.recipes import asked_for
from st_reba_cli import app, load, options

from ..backbones import TEXTS
from ..compare import samples
from ..compare.mteb_tasks import DemoSTSInOneSplit
from . import typed

#: Where it does not matter which recipes are compared.
TWO = ("--recipes", "classical,echo-2")


def test_version():
    assert __version__ in typed("--version")


def test_help_names_the_commands():
    output = typed(expect=2)
    assert "compare" in output
    assert "build" in output


@pytest.mark.usefixtures("quick_commands")
class TestCompare:
    @pytest.fixture
    def backbone_path(self, shallow_path):
        """How many layers there are does not matter to what stands around a comparison."""
        return lambda: shallow_path

    @pytest.fixture(autouse=True)
    def few_recipes(self, monkeypatch):
        def fewer(names, repetitions, fit_texts):
            asked = asked_for(names, repetitions, fit_texts)
            return [recipe for recipe in asked if recipe.name in ("Classical", "ReBA-2")]

        monkeypatch.setattr("st_reba.recipes.asked_for", fewer)

    def test_with_no_arguments(self, monkeypatch):
        """Where no model is at hand: random weights, which is told, the English demo texts, word sense."""
        monkeypatch.setattr(load, "fastest_on_cpu", lambda: torch.float32)
        monkeypatch.setattr(options, "find_spec", lambda name: None)
        shown = []
        real = room.compare

        def on_some(recipes, pairs, words, **settings):
            shown.append((recipes, pairs, words))
            some = dataclasses.replace(
                pairs, first=pairs.first[:12], second=pairs.second[:12], scores=pairs.scores[:12]
            )
            return real(recipes, some, OddOneOutEvaluator(words.questions[:2]), **settings)

        monkeypatch.setattr(room, "compare", on_some)
        output = typed("compare")
        ((recipes, pairs, words),) = shown
        assert recipes.backbone.model.config.hidden_size == 128
        assert (len(pairs), len(words.questions)) == (200, 40)
        for expected in (
            "random weights that stand in for a model on 200 demo pairs in English (float32, cpu)",
            "its figures mean nothing",
            "--recipes all compares every recipe.",
            "Word",
            "ReBA-2",
            "Bag of input embeddings",
            "1.0x",
            "Best on STS: ",
            "random weights",
            "12 pairs of texts",
            "With --out, also: Beyond overlap; STS, Pearson.",
        ):
            assert expected in output
        assert re.search(r"ReBA-2 mean ≈?−?\d+\.\d \[−?\d+, −?\d+\]", output)

    def test_the_answer_comes_first(self, backbone_path, tmp_path):
        report = tmp_path / "report"
        options = ("--model", backbone_path(), "--data", self.pairs(tmp_path), "--device", "cpu", "--out", report)
        result = CliRunner().invoke(app, [str(option) for option in ("compare", *options)])
        found = Comparison.load(report / "comparison.json")
        # What is told on the way is no part of the output: the first line of a pipe is the answer.
        assert result.stdout.splitlines()[0] == found.answer
        assert "tokens at" in result.stderr
        output = re.sub(r"\s+", " ", result.stdout)
        assert found.answer.startswith(("Use ", "None: ", "Two recipes"))
        assert found.answer in output
        assert output.index(found.answer) < output.index("on 20 pairs of pairs.tsv")
        assert found.answer in unescape((report / "report.html").read_text(encoding="utf-8"))
        assert bool(found.build) == bool(found.use)
        assert found.build in output

    def test_a_dry_run_tells_and_stops(self, backbone_path, tmp_path, monkeypatch):
        def never(*args, **settings):
            raise AssertionError

        options = ("--model", backbone_path(), "--data", self.pairs(tmp_path), "--device", "cpu", "--no-random")
        told = r"4 recipes on 40 texts, with controls and timings: [\d,]+ tokens at [\d,]+ a second here, about \d+ sec"
        assert re.search(told, typed("compare", *options))
        monkeypatch.setattr(room, "compare", never)
        output = typed("compare", *options, "--dry-run", "--out", tmp_path / "out")
        assert re.fullmatch(rf".*{told}onds\. Memory: about \d+\.\d GB at the peak, .* weights\. ?", output)
        assert [path.name for path in tmp_path.iterdir()] == ["pairs.tsv"]

    def test_without_controls(self, backbone_path, tmp_path):
        options = ("--model", backbone_path(), "--data", self.pairs(tmp_path), "--device", "cpu", "--no-controls")
        output = typed("compare", *options, "--recipes", "reba-2,classical")
        assert "Bag" not in output
        assert "Random" not in output
        assert "tf-idf" not in output

    def test_a_stopped_run_goes_on(self, backbone_path, tmp_path, monkeypatch):
        out = tmp_path / "out"
        options = ("--model", backbone_path(), "--data", self.pairs(tmp_path), "--device", "cpu", *TWO, "--out", out)
        with monkeypatch.context() as broken:
            broken.setattr("st_reba_cli.show.show", lambda *args: exec("raise ValueError('stopped')"))
            assert "stopped" in typed("compare", *options, expect=1)
        partial = tmp_path / "out.partial"
        assert list(partial.glob("*.safetensors"))
        assert not out.exists()
        assert f"Going on from {partial}, which a stopped run has left." in typed("compare", *options)
        assert (out / "comparison.json").exists()
        assert not partial.exists()

    def test_where_no_recipe_can_be_scored_what_was_found_is_kept(self, backbone_path, tmp_path, recwarn):
        data, out = tmp_path / "alike.tsv", tmp_path / "out"
        data.write_text("a\ta\t1\na\ta\t2\na\ta\t3\na\ta\t4\n", encoding="utf-8")
        options = ("--model", backbone_path(), "--data", data, "--device", "cpu", *TWO, "--out", out)
        output = typed("compare", *options)
        told = "no recipe has a number on STS. All labelled pairs look the same to every recipe, as where all texts are"
        assert output.count(f"There is no answer: {told} alike: give texts that differ.") == 1
        assert {"report.html", "results.csv", "comparison.json"} <= {path.name for path in out.iterdir()}
        assert told in (out / "report.html").read_text(encoding="utf-8")
        assert not (tmp_path / "out.partial").exists()
        assert not [warning for warning in recwarn if "constant" in str(warning.message)]
        assert told in typed("compare", "--saved", out / "comparison.json")
        # What is the best of none is not saved, and the report is kept all the same.
        again = (*options[:-1], tmp_path / "again", "--save-best", tmp_path / "best")
        assert "No recipe has a number for 'STS'" in typed("compare", *again, expect=1)
        assert (tmp_path / "again" / "report.html").exists()
        assert not (tmp_path / "best").exists()

    def test_against_an_older_one(self, backbone_path, tmp_path):
        data = self.pairs(tmp_path)
        options = ("--model", backbone_path(), "--data", data, "--device", "cpu", "--no-random", *TWO)
        old, new = (tmp_path / name / "comparison.json" for name in ("old", "new"))
        typed("compare", *options, "--out", old.parent)
        output = typed("compare", *options, "--against", old, "--out", new.parent, "--max-seq-length", 6)
        assert "changed beyond the interval" in output
        assert "The intervals are paired: both comparisons are of the same labelled pairs." in output
        again = typed("compare", "--saved", new, "--against", old)
        assert output[output.index("changed beyond") :].startswith(again[again.index("changed beyond") :])
        assert Comparison.load(new).answer in again

    def test_texts_of_the_other_language(self, monkeypatch):
        shown = []

        def asked(recipes, pairs, words, **settings):
            shown.append((pairs, len(words.questions)))
            raise ValueError("enough")

        monkeypatch.setattr(room, "compare", asked)
        assert "enough" in typed("compare", "--language", "zh", expect=1)
        assert shown == [(read_pairs(demo_pairs("zh")), 20)]

    @pytest.mark.parametrize(
        ("options", "repetitions", "fitted_on"),
        [
            # The same as build fits on, whatever the data.
            ((), 3, demo_sentences()),
            (("--language", "zh", "--repetitions", 5), 5, demo_sentences()),
            (("--data", "pairs.tsv"), 3, demo_sentences()),
            (("--data", "pairs.tsv", "--fit-texts", "texts.txt"), 3, TEXTS),
        ],
    )
    def test_all_recipes(self, options, repetitions, fitted_on, backbone_path, tmp_path, monkeypatch):
        self.pairs(tmp_path)
        (tmp_path / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        asked = []

        def every(names, repetitions, fit_texts):
            asked.append((names, repetitions, list(fit_texts)))
            raise ValueError("enough")

        monkeypatch.setattr("st_reba.recipes.asked_for", every)
        on = ("--model", backbone_path(), "--device", "cpu")
        assert "enough" in typed("compare", "--recipes", "all", *on, *options, expect=1)
        assert asked == [(["all"], repetitions, [text for text in fitted_on if text.strip()])]

    def test_the_fastest_precision(self, backbone_path, tmp_path, monkeypatch):
        monkeypatch.setattr(load, "fastest_on_cpu", lambda: torch.bfloat16)
        options = ("--model", backbone_path(), "--data", self.pairs(tmp_path), "--device", "cpu", "--no-controls", *TWO)
        monkeypatch.setattr(load, "agreement", lambda first, second: 0.995)
        output = typed("compare", *options)
        assert "In bfloat16, which this processor is fastest in: the cosines of some texts are in the order" in output
        assert "of those of float32 up to 0.995. --dtype overrides this." in output
        assert "pairs.tsv (bfloat16, cpu)" in output
        monkeypatch.setattr(load, "agreement", lambda first, second: 0.9)
        output = typed("compare", *options)
        assert "In float32, as bfloat16 does not agree: " in output
        assert "up to 0.900, and 0.99 is asked for." in output
        assert "pairs.tsv (float32, cpu)" in output
        assert load.placement("meta", "fastest") == ("meta", "auto")

    def pairs(self, tmp_path):
        data = tmp_path / "pairs.tsv"
        rows = [f"a cat {number}\ta dog {number * 7}\t{number % 5}" for number in range(20)]
        data.write_text("\n".join(rows), encoding="utf-8")
        return data

    def test_on_the_users_own(self, backbone_path, tmp_path):
        data = self.pairs(tmp_path)
        output = typed("compare", "--model", backbone_path(), "--data", data, "--max-seq-length", 9, "--device", "cpu")
        assert "on 20 pairs of pairs.tsv" in output
        assert "Word" not in output
        # Then there is room for it.
        assert "Beyond overlap, partial Spearman x 100." in output
        assert re.search(r"tf-idf +mean", output)

    def test_a_report_and_the_best(self, backbone_path, tmp_path):
        options = ("--model", backbone_path(), "--data", self.pairs(tmp_path), "--device", "cpu", "--dtype", "float32")
        report, best = tmp_path / "deep" / "report", tmp_path / "best"
        output = typed("compare", *options, "--out", report, "--save-best", best)
        assert f"Report: {report / 'report.html'}" in output
        named = re.search(r"Wrote (\S+), (mean|last) to", output)
        rows = {row["recipe"] + row["pooling"]: row for row in csv.DictReader((report / "results.csv").open())}
        own = {key: float(row["STS"]) for key, row in rows.items() if row["control"] == "False"}
        chosen = Comparison.load(report / "comparison.json").choice()
        assert named[1] + named[2] == chosen.recipe + chosen.pooling
        model = SentenceTransformer(str(best), device="cpu")
        assert type(model[0]).__name__ == {"Classical": "CausalTransformer", "ReBA-2": "ReBAModule"}[named[1]]
        assert np.allclose(np.linalg.norm(model.encode(TEXTS), axis=1), 1, atol=1e-6)
        card = (best / "README.md").read_text(encoding="utf-8")
        assert "## Beside other recipes" in card
        assert "Scores that chose are likely too high: on other texts expect less." in card
        assert f"**{Comparison.load(report / 'comparison.json').answer}**" in card
        assert "A score that chose among 4 recipes is likely too high" in output
        shown = f"{100 * own[named[1] + named[2]]:.1f}".replace("-", "−")
        # It may be one that cannot be told from the best.
        assert re.search(rf"\| {named[1]}, {named[2]} \| {shown}≈? \[", card)
        assert f"| Random weights, {named[1]}, {named[2]} |" in card
        assert "| Bag of input embeddings, mean |" in card
        again = typed("compare", *options, "--save-best", best, expect=1)
        assert "best exists and is not an empty directory: choose another --save-best" in again
        assert "report exists and is not an empty" in typed("compare", *options, "--out", report, expect=1)

    def test_a_search_saves_what_it_chose(self, backbone_path, tmp_path, monkeypatch):
        """On the half to choose on; what is ahead on the half that was held out is not taken instead."""
        every = [candidate for candidate in candidates(3) if candidate.row.name == "Classical"]
        every = [candidate for candidate in every if candidate.layer is None and not candidate.filter]
        monkeypatch.setattr("st_reba.compare.search.candidates", lambda layers, rows: every)
        rows = [row.split("\t") for row in demo_pairs("en").read_text(encoding="utf-8").splitlines()[:64]]
        few = "".join(
            f"{n} {first[:16]}\t{n} {second[:16]}\t{score}\n" for n, (first, second, score) in enumerate(rows)
        )
        (tmp_path / "demo_pairs_en.tsv").write_text(few, encoding="utf-8")
        monkeypatch.setattr("st_reba.data.demo._ASSETS", tmp_path)
        made = []
        real = room.compare

        def turned(recipes, pairs, *, chosen, **settings):
            """The scores of the held-out half, with another recipe ahead of the chosen."""
            found = real(recipes, pairs, chosen=chosen, **settings)
            results = [
                dataclasses.replace(
                    result,
                    scores={
                        name: dataclasses.replace(score, value=-0.123 if result.name == chosen else 0.9)
                        for name, score in result.scores.items()
                    },
                )
                for result in found.results
            ]
            made.append(chosen)
            return dataclasses.replace(found, results=results)

        monkeypatch.setattr(room, "compare", turned)
        best, report = tmp_path / "best", tmp_path / "report"
        options = ("--model", backbone_path(), "--device", "cpu", "--save-best", best, "--out", report)
        output = typed("search", *options)
        (chosen,) = made
        assert chosen in ("Classical, mean", "Classical, last")
        assert f"and chose {chosen}" in output
        assert f"Wrote {chosen} to {best}" in output
        assert "32 demo pairs in English, held out" in output
        model = SentenceTransformer(str(best), device="cpu")
        assert model[1].pooling_mode == {"mean": "mean", "last": "lasttoken"}[chosen.rpartition(", ")[2]]
        card = (best / "README.md").read_text(encoding="utf-8")
        assert "on other texts than those of the scores, which are of 32 demo pairs in English, held out" in card
        assert "The best of the recipes" not in card
        assert f"| {chosen} | −12.3≈ [" in card
        page = (report / "report.html").read_text(encoding="utf-8")
        assert f", and chose {chosen}. The scores shown are of 32 other pairs" in page
        assert "Classical <span" in page.partition('class="leader"')[2][:60]

    def test_word_sense_questions_of_ones_own(self, backbone_path, tmp_path):
        words = tmp_path / "words.csv"
        words.write_text(
            "问题,选项1,选项2,选项3,选项4,答案\n“cat”,a cat,1 cat,cat 2,cat,A\n“dog”,a dog,1 dog,dog,dogs,D\n",
            encoding="utf-8",
        )
        output = typed(
            "compare", "--model", backbone_path(), "--data", self.pairs(tmp_path), "--words", words, "--no-controls"
        )
        assert "2 questions" in output

    def test_plain_texts(self, backbone_path, tmp_path):
        data = tmp_path / "texts.txt"
        data.write_text("\n".join([*TEXTS, "the last one"]), encoding="utf-8")
        output = typed("compare", "--model", backbone_path(), "--data", data, "--no-controls")
        assert "plain texts of texts.txt" in output
        assert "these are proxies" in output
        assert "Best on" not in output
        refused = typed("compare", "--model", backbone_path(), "--data", data, "--save-best", tmp_path / "m", expect=1)
        assert "--save-best needs labels, and plain texts have none" in refused

    def test_retrieval(self, backbone_path, tmp_path):
        """A task of one's own, prompts, and what is saved: a model with the prompts that it was measured with."""
        files = {
            "queries.jsonl": "".join(f'{{"_id": "q{n}", "text": "which cat is {n}?"}}\n' for n in range(6)),
            "corpus.csv": "_id,title,text\n" + "".join(f'd{n},Cats,"a cat, {n}"\n' for n in range(9)),
            "qrels.tsv": "query-id\tcorpus-id\tscore\n" + "".join(f"q{n}\td{n}\t1\n" for n in range(6)),
        }
        for name, content in files.items():
            (tmp_path / name).write_text(content, encoding="utf-8")
        queries, corpus, qrels = (tmp_path / name for name in files)
        best = tmp_path / "best"
        output = typed(
            "compare", "--model", backbone_path(), "--device", "cpu", "--queries", queries, "--corpus", corpus,
            "--qrels", qrels, "--query-prompt", "question: ", "--save-best", best,
        )  # fmt: skip
        assert "6 queries, 9 documents, 6 judged relevant." in output
        assert "on 6 queries on 9 documents of queries.jsonl" in output
        assert "Best on Retrieval: " in output
        assert "Recall@100" in output
        model = SentenceTransformer(str(best), device="cpu")
        assert model.prompts["query"] == "question: "
        assert np.allclose(model.encode_query("a"), model.encode("a", prompt="question: "))
        card = (best / "README.md").read_text(encoding="utf-8")
        assert "model.encode_query" in card
        assert "question: " in card

    def test_the_retrieval_demo(self, backbone_path, monkeypatch):
        shown = []

        def asked(recipes, data, words, **settings):
            shown.append((data, words))
            raise ValueError("enough")

        monkeypatch.setattr(room, "compare", asked)
        typed("compare", "--model", backbone_path(), "--demo", "retrieval", "--language", "zh", expect=1)
        ((data, words),) = shown
        assert (len(data), len(data.documents), words) == (60, 300, None)

    def test_labels_in_a_csv_are_read(self, backbone_path, tmp_path):
        """It was read as plain texts, header and all, in silence."""
        data = tmp_path / "pairs.csv"
        rows = "".join(f'"a cat, {number}",a dog {number * 7},{number % 5}\n' for number in range(20))
        data.write_text(f"text1,text2,label\n{rows}", encoding="utf-8")
        output = typed("compare", "--model", backbone_path(), "--data", data, "--device", "cpu", "--no-controls")
        assert (
            "pairs.csv: 20 pairs with scores from 0 to 4; columns: text1 as sentence1, text2 as sentence2, label as"
            in output
        )
        assert "Best on STS" in output

    def test_mteb(self, backbone_path, tmp_path, monkeypatch):
        monkeypatch.setattr("st_reba.compare.mteb.resolve_tasks", lambda names: [DemoSTSInOneSplit() for name in names])
        options = (
            "--model",
            backbone_path(),
            "--mteb-results",
            tmp_path / "mteb",
            "--mteb",
            "DemoSTSInOneSplit",
            "--no-controls",
        )
        output = typed("compare", *options)
        assert "on 1 tasks of mteb" in output
        assert "DemoSTSInOneSplit" in output
        assert list((tmp_path / "mteb" / "results").rglob("DemoSTSInOneSplit.json"))

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            (
                ("--out", "new", "--save-best", "best", "--model", "nowhere"),
                "--model, --out, --save-best: --saved shows what was found before, beside --against if that is given; "
                "leave them out.",
            ),
            (("--dtype", "float32"), "--dtype: --saved shows what was found before"),
            (("--data", "x.tsv", "--columns", "a"), "--data, --columns: --saved"),
            (("--demo", "pairs", "--language", "zh"), "--demo, --language: --saved"),
            (
                ("--batch-size", 8, "--max-seq-length", 9, "--device", "cpu"),
                "--batch-size, --max-seq-length, --device:",
            ),
            (("--recipes", "all", "--repetitions", 2), "--recipes, --repetitions: --saved"),
            (("--no-controls", "--no-random", "--dry-run"), "--no-controls, --no-random, --dry-run: --saved"),
            (("--mteb", "STSB", "--mteb-results", "r"), "--mteb, --mteb-results: --saved"),
            (("--words", "w", "--fit-texts", "t"), "--words, --fit-texts: --saved"),
            (("--prompt-language", "zh"), "--prompt-language: --saved"),
        ],
    )
    def test_what_was_saved_is_shown_and_nothing_else_done(self, options, named, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        samples.real().save(tmp_path / "c.json")
        assert named in typed("compare", "--saved", "c.json", *options, expect=1)
        assert [path.name for path in tmp_path.iterdir()] == ["c.json"]
        assert samples.real().answer in typed("compare", "--saved", "c.json")

    def test_repetitions_are_for_all_however_it_is_named(self, backbone_path, monkeypatch):
        def stop(names, repetitions, fit_texts):
            raise ValueError(f"{names} {repetitions}")

        monkeypatch.setattr("st_reba.recipes.asked_for", stop)
        options = ("--recipes", "all,reba-2", "--repetitions", 2)
        assert "['all,reba-2'] 2" in typed("compare", "--model", backbone_path(), *options, expect=1)
