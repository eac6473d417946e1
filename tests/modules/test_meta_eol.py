"""What MetaEOL has of its own, besides its oracle: several prompts in one batch."""

from __future__ import annotations

import numpy as np
import torch

from st_reba import META_TASKS, TEMPLATES, MetaEOLModule

from .. import oracles
from ..backbones import TEXTS
from ..conftest import pipeline, relative_error
from .methods import TOLERANCE

TASKS = ['Topic of "{text}":"', "{text} sounds", 'In one word, this text: "{text}" means:"', "promptsth"]


def test_a_prompt_stands_before_each(shared, eager, token_ids):
    whole = ["query: " + TEMPLATES.get(task, task).replace("{text}", "the cat") for task in TASKS]
    with torch.no_grad():
        expected = oracles.meta_eol(eager(), list(map(token_ids, whole))).mean(dim=0)
    vector = pipeline(MetaEOLModule(shared(), templates=TASKS)).encode("the cat", prompt="query: ")
    assert relative_error(vector, expected) < TOLERANCE


def test_what_stands_before_the_texts_runs_once_and_then_all_prompts_in_one_batch(shared, token_ids):
    module = MetaEOLModule(shared(), templates=TASKS)
    shapes = []
    module.model.embed_tokens.register_forward_pre_hook(lambda table, args: shapes.append(tuple(args[0].shape)))
    with torch.no_grad():
        assert module(module.preprocess(["a", "a"]))["token_embeddings"].shape == (2, len(TASKS), 32)
    literals = [TEMPLATES.get(task, task).split("{text}") for task in TASKS]
    before, after = (max(len(token_ids(text)) for text in side) for side in zip(*literals, strict=True))
    assert shapes == [(len(TASKS), before), (2 * len(TASKS), len(token_ids("a")) + after)]
    shapes.clear()
    with torch.no_grad():
        module(module.preprocess(["a"]))
    assert shapes == [(len(TASKS), len(token_ids("a")) + after)]


def test_room_is_that_of_the_longest_prompt(backbone_path):
    path = backbone_path("gpt2")
    short, long = "{text}", "a rather long prompt for so small a model: {text}"
    alone = {task: MetaEOLModule(path, templates=[task]).max_seq_length for task in (short, long)}
    assert alone[long] < alone[short] == 256
    both = MetaEOLModule(path, templates=[short, long])
    assert both.max_seq_length == alone[long]
    features = both.preprocess(["word " * 3_000], prompt="query: ")
    assert features["input_ids"].shape == (2, 256)
    # All prompts are given the same tokens.
    assert len(set((features["copy_index"] == 0).sum(dim=1).tolist())) == 1
    assert np.isfinite(pipeline(both).encode("word " * 3_000)).all()


def test_the_papers_prompts(roomy_path):
    """Eight, which change the texts; a list of one's own does not."""
    module = MetaEOLModule(roomy_path)
    assert module.templates == list(META_TASKS)
    assert "8 passes, in one batch" in module.cost
    assert module(module.preprocess(TEXTS[:2]))["token_embeddings"].shape == (2, 8, 32)
    assert module.normalize_text
    assert not MetaEOLModule(roomy_path, templates=list(META_TASKS)).normalize_text
    assert MetaEOLModule(roomy_path, templates="ck").templates == [TEMPLATES["pretended-cot"], TEMPLATES["knowledge"]]
