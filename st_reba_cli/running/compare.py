"""What ``st-reba compare`` does."""

from __future__ import annotations

from pathlib import Path

from st_reba.compare import Recipes, compare, compare_tasks, forecast, texts_of
from st_reba.compare.mteb import language_of_tasks, resolve_tasks
from st_reba.compare.results import Comparison
from st_reba.data.demo import demo_questions
from st_reba.data.tables import Data, Labelled
from st_reba.evaluation import OddOneOutEvaluator
from st_reba.modules import CausalTransformer
from st_reba.recipes import asked_for
from st_reba.text.templates import language_of

from ..common import Dtype, Language
from ..data import Demo, Given
from ..printing import console, notes
from . import search as searching
from .given import described, read, texts_to_fit
from .models import check_devices, load_fastest
from .prompts import in_asked_language
from .showing import has_page, kept, running, show, show_changes, shown_model, typed, write

# With --recipes all.
_REPETITIONS = 3


def run(
    *,
    model: str,
    given: Given,
    words: Path | None,
    mteb: list[str] | None,
    mteb_results: Path | None,
    recipes: list[str] | None,
    search: bool,
    seed: int | None,
    fit_texts: str | None,
    prompt_language: Language | None,
    repetitions: int | None,
    controls: bool,
    random: bool,
    dry_run: bool,
    against: Path | None,
    saved: Path | None,
    out: Path | None,
    best: Path | None,
    batch_size: int,
    max_seq_length: int | None,
    dtype: Dtype,
    device: str | None,
) -> None:
    """Compare, show what was found, and write it."""
    if search:
        searching.run(
            model=model, given=given, seed=seed or 0, random=random, prompt_language=prompt_language, out=out,
            best=best, batch_size=batch_size, max_seq_length=max_seq_length, dtype=dtype, device=device,
        )  # fmt: skip
        return
    old = None if against is None else Comparison.load(against)
    if saved is not None:
        found = Comparison.load(saved)
        show(found)
        if old is not None:
            show_changes(found, old)
        return
    with_page = has_page(out)
    check_devices(device)
    tasks = resolve_tasks(mteb) if mteb else []
    texts: Data = [] if tasks else read(given)
    measured_on = f"{len(tasks)} tasks of mteb" if tasks else described(given, texts)
    if best is not None and not tasks and not isinstance(texts, Labelled):
        raise ValueError("--save-best needs labels, and plain texts have none: use st-reba build to choose yourself.")
    shipped = None if tasks or given.own else given.demo_language
    questions = None if tasks else _questions(words, None if given.demo is Demo.retrieval else shipped)
    fit_on = texts_to_fit(fit_texts)
    asked = asked_for(recipes or ["few"], repetitions or _REPETITIONS, fit_on)
    language = language_of_tasks(tasks) if tasks else language_of(texts_of(texts))
    asked = in_asked_language(asked, prompt_language, language)
    counted = controls and isinstance(texts, Labelled)
    if fit_texts is not None and not counted and not any(recipe.fitted for recipe in asked):
        raise ValueError(
            "--fit-texts is for recipes that are fitted on texts, such as early-late, and for tf-idf beside labels: "
            "there is neither here; leave it out."
        )
    if words is not None and not controls and not any(recipe.words for recipe in asked):
        raise ValueError(
            "--words asks for the embeddings of words, and none of the recipes has them: leave it out, or name one "
            "that has, such as echo-2."
        )
    random = random and controls
    backbone = load_fastest(
        CausalTransformer, model, max_seq_length, dtype, device, fit_on if tasks else texts_of(texts)
    )
    store = None if tasks or dry_run else kept(out)
    compared = Recipes(backbone, asked, batch_size=batch_size, controls=controls, kept=store)
    total = None
    if not tasks:
        expected = forecast(compared, texts_of(texts), questions, random)
        (console if dry_run else notes).print(str(expected), soft_wrap=True)
        total = expected.tokens
    if dry_run:
        return
    with running(compared, total):
        if tasks:
            found = compare_tasks(compared, tasks, model=shown_model(model), output=mteb_results, random=random)
        else:
            found = compare(compared, texts, questions, fit_texts=fit_on if fit_texts else None, random=random)
    hints = [] if recipes else ["--recipes all compares every recipe."]
    found = typed(found, model, measured_on, fit_texts=fit_texts, max_seq_length=max_seq_length)
    show(found, hints)
    write(found, compared, out, with_page, best)
    if old is not None:
        show_changes(found, old)


def _questions(words: Path | None, demo: Language | None) -> OddOneOutEvaluator | None:
    """The word-sense questions to ask, if any: a file's, or those of the package in a language."""
    if words is not None:
        return OddOneOutEvaluator.from_csv(words)
    return None if demo is None else OddOneOutEvaluator.from_csv(demo_questions(demo.value))
