"""A GGUF file that llama.cpp runs gives what transformers gives, in every method that reads states as they are."""

from __future__ import annotations

import ctypes.util
import json
import pickle
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

import st_reba
from st_reba.export import save_plain
from st_reba.hub.push import check_saved_model
from st_reba.lm import llama_cpp
from st_reba.lm.llama_cpp import LlamaCpp
from st_reba.lm.passes import Replace

from .. import ggufs
from ..cli import typed
from ..conftest import pipeline, reloaded

TEXTS = ["A man is playing a guitar.", "The storm closed the harbour for two days, and the ferries stayed.", "", "Yes."]


@pytest.fixture(scope="module", autouse=True)
def kept(tmp_path_factory):
    """Where what is read out of files is kept."""
    with pytest.MonkeyPatch.context() as patch:
        ggufs.keep_at(tmp_path_factory.mktemp("assets"), patch)
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    pytest.importorskip("xllamacpp")
    return ggufs.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def language_model(file) -> st_reba.LlamaCppTransformer:
    return st_reba.LlamaCppTransformer(str(file))


@pytest.fixture(scope="module")
def in_transformers(file) -> st_reba.CausalTransformer:
    return st_reba.CausalTransformer(str(file))


def handed_on(module) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode():
        found = module(module.preprocess(TEXTS))
    return found["token_embeddings"], found["attention_mask"]


READERS = [
    (st_reba.CausalTransformer, {}),
    (st_reba.CausalTransformer, {"template": "prompteol"}),
    (st_reba.CausalTransformer, {"pool_over": "whole", "rows": "last"}),
    (st_reba.CausalTransformer, {"output_layer": 1}),
    (st_reba.CausalTransformer, {"output_layer": 1, "final_norm": False}),
    (st_reba.CausalTransformer, {"final_norm": False}),
    (st_reba.EchoModule, {"repetitions": 3, "pool_copies": "repeated"}),
    (st_reba.MetaEOLModule, {}),
    (st_reba.TopicModule, {}),
    (st_reba.EarlyLateModule, {}),
    (st_reba.InputEmbeddings, {}),
]


@pytest.mark.filterwarnings("ignore:A text without tokens")
@pytest.mark.parametrize(("kind", "settings"), READERS)
def test_states_are_those_of_transformers(language_model, in_transformers, kind, settings):
    ours, mask = handed_on(kind(language_model, **settings))
    theirs, their_mask = handed_on(kind(in_transformers, **settings))
    assert torch.equal(mask, their_mask)
    # llama.cpp keeps keys and values in half precision.
    assert torch.allclose(ours, theirs, atol=4e-2 * float(theirs.std()))
    assert torch.cosine_similarity(ours[mask > 0], theirs[mask > 0], dim=-1)[ours[mask > 0].any(-1)].min() > 0.9999


def test_an_embedding_does_not_depend_on_its_batch(language_model):
    model = pipeline(language_model)
    together = model.encode([*TEXTS[:2], "word " * 100], batch_size=3)
    alone = [model.encode([text])[0] for text in [*TEXTS[:2], "word " * 100]]
    assert (together == alone).all()


def test_a_text_of_several_parts_is_read_as_one(language_model, in_transformers):
    text = ["one two three four five six " * 60]
    ours, theirs = (pipeline(st_reba.EchoModule(module)).encode(text) for module in (language_model, in_transformers))
    assert torch.cosine_similarity(*map(torch.tensor, (ours, theirs))).item() > 0.9999


def test_texts_end_where_the_model_has_no_more_positions(language_model):
    assert language_model.max_seq_length == ggufs.POSITIONS
    assert st_reba.EchoModule(language_model).max_seq_length == ggufs.POSITIONS // 2
    assert pipeline(language_model).encode(["word " * 3 * ggufs.POSITIONS]).shape == (1, ggufs.BLOCK)


LOOKS = [st_reba.ReBAModule, st_reba.BidirectionalLastLayer, st_reba.KVReroutingModule, st_reba.RefinedThoughtModule]
CHANGES = [st_reba.TokenPrependingModule, st_reba.ValueAggregationModule]


@pytest.mark.parametrize("kind", [*LOOKS, *CHANGES])
def test_what_changes_states_or_looks_at_attention_is_refused(language_model, kind):
    with pytest.raises(ValueError, match="Use |use ") as refused:
        handed_on(kind(language_model))
    assert "LlamaCpp" in str(refused.value) or "runs elsewhere" in str(refused.value)


def test_a_saved_model_has_its_file_in_it_and_takes_no_other(language_model, file, tmp_path):
    model = st_reba.build(language_model, "topic", texts=[f"{text} {n}" for n in range(30) for text in TEXTS[:2]])
    model.save_pretrained(str(tmp_path / "saved"))
    (saved,) = (tmp_path / "saved").glob("*/tiny.gguf")
    assert saved.samefile(file), "a link on the same disk"
    assert (SentenceTransformer(str(tmp_path / "saved")).encode(TEXTS) == model.encode(TEXTS)).all()
    config = json.loads((saved.parent / "config.json").read_text())
    assert str(file.parent) not in json.dumps(config)
    check_saved_model(tmp_path / "saved")

    ggufs.write(tmp_path / "other.gguf", seed=1)
    saved.unlink()
    (tmp_path / "other.gguf").rename(saved)
    with pytest.raises(ValueError, match="is not the file that the model was saved with"):
        SentenceTransformer(str(tmp_path / "saved"))
    saved.unlink()
    with pytest.raises(FileNotFoundError, match="has no tiny.gguf, the GGUF file that the model runs on"):
        SentenceTransformer(str(tmp_path / "saved"))
    (saved.parent / "config.json").write_text(json.dumps({**config, "file": "../tiny.gguf"}))
    with pytest.raises(ValueError, match="give the name of a GGUF file"):
        SentenceTransformer(str(tmp_path / "saved"))
    (saved.parent / "config.json").write_text(json.dumps({**config, "file": 3}))
    with pytest.raises(ValueError, match="give the name of a GGUF file"):
        SentenceTransformer(str(tmp_path / "saved"))


def test_no_other_model_is_taken_and_none_is_exported(language_model, shallow_path, tmp_path):
    with pytest.raises(ValueError, match="is not a GGUF file, and llama.cpp runs no other"):
        st_reba.LlamaCppTransformer(shallow_path)
    for module in (language_model, st_reba.CausalTransformer(language_model)):
        with pytest.raises(ValueError, match=f"{type(module).__name__} runs on llama.cpp. Build it on the model in"):
            save_plain(pipeline(module), tmp_path)


def test_a_model_that_ends_early_is_saved_so(language_model, tmp_path):
    model = pipeline(st_reba.CausalTransformer(language_model, output_layer=1))
    again = reloaded(model, tmp_path / "saved")
    assert (again.encode(TEXTS) == model.encode(TEXTS)).all()
    assert len(again[0].model.layers) == 1


def test_another_process_loads_the_file_itself(language_model):
    again = pickle.loads(pickle.dumps(pipeline(language_model)))
    assert (again.encode(TEXTS[:2]) == pipeline(language_model).encode(TEXTS[:2])).all()


def test_generation_is_that_of_transformers_and_the_same_while_another_thread_embeds(language_model):
    ids, model = [1, 5, 9, 7], language_model.model.llama_cpp
    theirs = ggufs.original().generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False)[0, len(ids) :].tolist()
    alone = list(model.generate(ids, 40))
    assert alone == (theirs[: theirs.index(0)] if 0 in theirs else theirs)
    embedder = pipeline(st_reba.EchoModule(language_model))
    embedded, found = embedder.encode(TEXTS), []
    thread = threading.Thread(target=lambda: found.extend(list(model.generate(ids, 40)) for _ in range(5)))
    thread.start()
    while thread.is_alive():
        assert (embedder.encode(TEXTS) == embedded).all()
    assert found == [alone] * 5


def test_what_is_drawn_follows_its_seed(language_model):
    drawn = [
        tuple(language_model.model.llama_cpp.generate([1, 5], 20, temperature=2.0, top_p=0.9, seed=seed))
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert language_model.generate("Hello", max_new_tokens=1) is not None


@pytest.mark.parametrize(("ids", "new"), [([], 4), ([1] * 2000, 100)])
def test_generation_needs_room_and_chat_a_template(language_model, ids, new):
    with pytest.raises(ValueError, match="2048 positions"):
        list(language_model.model.llama_cpp.generate(ids, new))
    with pytest.raises(ValueError, match="chat_template is not set"):
        language_model.generate([{"role": "user", "content": "Hello"}])


@pytest.mark.parametrize("architecture", ["nothing", "llama-cut"])
def test_what_llama_cpp_cannot_load_is_said_with_its_reason(file, tmp_path, architecture):
    path = tmp_path / "model.gguf"
    ggufs.write(path, architecture="llama" if architecture == "llama-cut" else architecture)
    if architecture == "llama-cut":
        path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(ValueError, match=r"llama.cpp cannot load it \(.+\)"):
        st_reba.LlamaCppTransformer(str(path))


def test_the_command_builds_and_encodes(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("\n".join(TEXTS[:2]))
    asked = f"build --engine llama.cpp --model {file}"
    typed(f"{asked} --recipe echo-2 --out model")
    typed("encode model texts.txt --out v.npy")
    assert (np.load("v.npy") == SentenceTransformer("model").encode(TEXTS[:2])).all()
    assert "cannot be made to attend both ways" in typed(f"{asked} --recipe bidirectional --out other", expect=1)
    assert "no access to the LM head" in typed(f"{asked} --sparse --out other", expect=1)
    assert not Path("other").exists()


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_a_state_that_a_hook_replaces_is_refused(language_model, side):
    change = Replace([language_model.lm.layers[1]], **{side: lambda states: 2 * states})
    [layout] = language_model.lay_out(TEXTS[:1])
    with torch.inference_mode(), pytest.raises(ValueError, match="can be looked at, and not changed"):
        language_model.run(layout, change)


def test_an_architecture_that_ends_in_something_else_has_last_states_alone(file, language_model, monkeypatch):
    monkeypatch.setattr(LlamaCpp, "final_norm", lambda self: ({}, 1e-5))
    bare = st_reba.LlamaCppTransformer(str(file))
    ours, _ = handed_on(st_reba.EchoModule(bare))
    assert torch.allclose(ours, handed_on(st_reba.EchoModule(language_model))[0], atol=1e-4)
    for settings in ({"output_layer": 1}, {"final_norm": False}):
        with pytest.raises(ValueError, match=r"LlamaCppModel"):
            handed_on(st_reba.CausalTransformer(bare, **settings))
    with pytest.raises(ValueError, match="The layers of LlamaCppModel were not found"):
        st_reba.TopicModule(bare)


def test_a_file_of_ollamas_has_no_suffix_and_gets_one(file, tmp_path):
    (tmp_path / "sha256-0a1b").symlink_to(file)
    model = pipeline(st_reba.LlamaCppTransformer(str(tmp_path / "sha256-0a1b")))
    assert (reloaded(model, tmp_path / "saved").encode(TEXTS[:1]) == model.encode(TEXTS[:1])).all()


# What is said where llama.cpp is not there, or is another one, or the file is none: none is needed here.


@pytest.fixture
def anew():
    llama_cpp.library.cache_clear()
    yield
    llama_cpp.library.cache_clear()


def test_a_missing_extra_is_named(tmp_path, anew, monkeypatch):
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(ImportError, match=r'llama.cpp needs xllamacpp: pip install "st-reba\[llamacpp\]"'):
        st_reba.LlamaCppTransformer(str(ggufs.write(tmp_path / "model.gguf")))


def test_a_release_that_is_called_otherwise_is_refused_before_it_is_called(anew, monkeypatch):
    another = SimpleNamespace(__file__=ctypes.util.find_library("c"))
    monkeypatch.setitem(sys.modules, "xllamacpp", SimpleNamespace(__version__="2030.1.1", xllamacpp=another))
    with pytest.raises(ImportError, match=r'xllamacpp 2030.1.1 brings .* pip install "xllamacpp=='):
        llama_cpp.library()


OTHER_FILES = [
    ("gone.gguf", None, FileNotFoundError, "there is no such file"),
    ("text.gguf", b"version https://git-lfs", ValueError, "is not a GGUF file: it does not begin with GGUF"),
    ("model.safetensors", b"x", ValueError, "is not a GGUF file, and llama.cpp runs no other"),
    ("model-00001-of-00002.gguf", b"GGUF", ValueError, "one part of several"),
]


@pytest.mark.parametrize(("name", "content", "error", "says"), OTHER_FILES)
def test_other_files_are_refused(tmp_path, name, content, error, says):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=says):
        st_reba.LlamaCppTransformer(str(tmp_path / name))


def test_a_saved_model_is_taken_by_its_own_directory(language_model, tmp_path):
    """The file is in the folder of its first module."""
    pipeline(language_model, "lasttoken").save_pretrained(str(tmp_path))
    assert type(st_reba.LlamaCppTransformer(str(tmp_path)).model) is type(language_model.model)
