"""BeLLM: what is built and trained, by one process or several, and from a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import socket

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments

from st_reba import TEMPLATES, BidirectionalLastLayer, CausalTransformer
from st_reba.hub.push import check_saved_model
from st_reba.train import BeLLMTraining, bellm, build_bellm, train_bellm

from .. import processes
from ..backbones import TEXTS
from ..conftest import change, long
from . import check_card, stop

pytest.importorskip("peft")


@pytest.fixture
def given(shallow_path, tmp_path):
    """Settings by name, for a model of one layer."""
    path = tmp_path / "triplets.tsv"
    others = [*zip(TEXTS, [*TEXTS[2:], *TEXTS[:2]], strict=True)]
    rows = [f"{text} {n}\t{text} again {n}\t{other} not {n}" for n in range(2) for text, other in others]
    path.write_text("\n".join(rows), encoding="utf-8")
    usual = {"per_device_train_batch_size": 4, "learning_rate": 1e-2}
    return lambda changes=(), **arguments: {
        "model": shallow_path, "triplets": str(path), "rank": 4, **dict(changes), "arguments": {**usual, **arguments},
    }  # fmt: skip


@pytest.fixture
def settings(given):
    return lambda changes=(), **arguments: BeLLMTraining(**given(changes, **arguments))


@pytest.mark.parametrize(
    ("layers", "module_class", "count"),
    [("none", CausalTransformer, 0), ("last", BidirectionalLastLayer, 1), ("all", BidirectionalLastLayer, 3)],
)  # fmt: skip
def test_table_4(layers, module_class, count, settings, backbone_path):
    module = build_bellm(settings({"model": backbone_path(), "bidirectional_layers": layers}))[0]
    assert type(module) is module_class
    assert (module.bidirectional_layers, module.pool_over) == (count, "all")
    assert module.template == 'The representative word for sentence {text} is:"'


def test_what_is_read_around_the_text(settings):
    """A template's name is its text alone. The last token sees all others in any case: nothing changes there."""
    module = build_bellm(settings({"pool_over": "whole", "template": "knowledge"}))[0]
    assert (module.pool_over, module.rows, module.normalize_text) == ("whole", "all", False)
    assert (module.output_layer, module.final_norm, module.template) == (None, True, TEMPLATES["knowledge"])
    with pytest.warns(UserWarning, match='reads the last token alone, which sees all others .* Use pooling="mean"'):
        build_bellm(settings({"pooling": "lasttoken"}))


@pytest.mark.parametrize("architecture", ["gpt2", *map(long, ["llama", "phi3", "gpt_neox", "gemma3"])])
def test_every_linear_layer_is_adapted_and_nothing_else_is_trained(architecture, settings, backbone_path):
    model = build_bellm(settings({"model": backbone_path(architecture)}))
    bellm.add_lora(model, settings())
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    left = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear and "lora" not in name}
    assert all(name.endswith("base_layer") for name in left)
    with pytest.raises(ValueError, match="Target modules .*nowhere.* not found in the base model"):
        bellm.add_lora(build_bellm(settings()), settings({"target_modules": ["nowhere"]}))


def test_adapter_and_merged_model_are_one(settings, tmp_path, monkeypatch):
    """Evaluated as it goes. The merged model can be pushed; the adapter once its backbone has a name others know."""
    (tmp_path / "pairs.tsv").write_text("one\ttwo\t1\nthree\tfour\t2\nfive\tsix\t4\n")
    given = settings({"evaluation": str(tmp_path / "pairs.tsv")}, max_steps=2, eval_steps=1)
    before = build_bellm(given).encode(TEXTS)
    merged = train_bellm(given, tmp_path / "run", progress=False)
    embeddings = merged.encode(TEXTS)
    assert np.abs(embeddings - before).max() > 1e-2
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, rtol=1e-5)

    monkeypatch.chdir(tmp_path)
    whole, adapter = (SentenceTransformer(f"run/{name}", device="cpu") for name in ("model", "adapter"))
    assert np.array_equal(whole.encode(TEXTS), embeddings)
    assert np.abs(adapter.encode(TEXTS) - embeddings).max() < 1e-5
    assert all(parameter.requires_grad for parameter in merged.parameters()), "it can be trained on"
    for model in (whole, adapter):
        assert [type(module).__name__ for module in model] == ["BidirectionalLastLayer", "Pooling", "Normalize"]
    (state,) = (tmp_path / "run/checkpoints").glob("checkpoint-2/trainer_state.json")
    log = json.loads(state.read_text())["log_history"]
    assert [entry["step"] for entry in log if "eval_spearman_cosine" in entry] == [1, 2]

    check_card(tmp_path / "run/model", "**Bidirectional last layer**", "MultipleNegativesRankingLoss", "`max_steps`: 2")
    check_saved_model(tmp_path / "run/model")
    with pytest.raises(ValueError, match=r"is an adapter on the directory .*, so nobody else"):
        check_saved_model(tmp_path / "run/adapter")
    change(tmp_path / "run/adapter/adapter_config.json", base_model_name_or_path="Qwen/Qwen3-0.6B")
    check_saved_model(tmp_path / "run/adapter")


def test_what_a_stopped_run_goes_on_as(settings, shallow_path, tmp_path, monkeypatch):
    """Not as one of another rank, nor with a model that changed in its place: the checkpoints hold the adapter alone.
    But with data that have moved. LoRA's weights are float32 and stay so, whatever the backbone's are."""
    path, run = shutil.copytree(shallow_path, tmp_path / "half"), {"num_train_epochs": 2, "save_steps": 2}
    weights = load_file(path / "model.safetensors")
    save_file({name: own.bfloat16() for name, own in weights.items()}, path / "model.safetensors", {"format": "pt"})
    change(path / "config.json", dtype="bfloat16")
    half = {"model": str(path), "model_kwargs": {"dtype": "bfloat16"}}
    straight = train_bellm(settings(half, **run), tmp_path / "straight", progress=False)
    stop(train_bellm, settings(half, **run), tmp_path / "broken", 3)
    with pytest.raises(ValueError, match="a run with rank=4, but this run has rank=8"):
        train_bellm(settings({**half, "rank": 8}, **run), tmp_path / "broken", progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(bellm, "weights_digest", lambda model: "another")
        with pytest.raises(ValueError, match="a run with frozen_weights='.*', but this run has frozen_weights="):
            train_bellm(settings(half, **run), tmp_path / "broken", progress=False)
    moved = (tmp_path / "triplets.tsv").rename(tmp_path / "moved.tsv")
    resumed = train_bellm(settings({**half, "triplets": str(moved)}, **run), tmp_path / "broken", progress=False)
    assert resumed[0].model.dtype == torch.bfloat16
    assert torch.equal(resumed.encode(TEXTS, convert_to_tensor=True), straight.encode(TEXTS, convert_to_tensor=True))
    file = "adapter/adapter_model.safetensors"
    expected, weights = (load_file(tmp_path / name / file) for name in ("straight", "broken"))
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


def test_two_processes_are_one(given, tmp_path, monkeypatch):
    """Negatives are those of both; the gradient is that of the whole batch: SGD, so that a weight moves as far as its
    gradient says. A checkpoint is written by one: what several write at once may be read half-written."""
    common = {
        "optim": "sgd", "learning_rate": 0.5, "use_cpu": True, "dataloader_drop_last": True, "num_train_epochs": 1,
        "batch_sampler": "batch_sampler", "save_steps": 1, "max_steps": 2,
    }  # fmt: skip
    four, two = (given({"dropout": 0.0}, per_device_train_batch_size=rows, **common) for rows in (4, 2))
    out = tmp_path / "two"
    with monkeypatch.context() as patch:
        patch.setattr(SentenceTransformerTrainingArguments, "should_save", False)
        one = train_bellm(BeLLMTraining(**four), tmp_path / "one", progress=False).encode(TEXTS)
    assert not [*(tmp_path / "one/checkpoints").glob("checkpoint-1/modules.json")]
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(two), encoding="utf-8")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    env = {
        **os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"
    }  # fmt: skip
    code = "import runpy; runpy.run_module('st_reba_cli', run_name='__main__')"
    command = ["-c", code, "train", "bellm", "--config", tmp_path / "settings.yaml", "--out", out]
    ranks: list[dict] = [{**env, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    running = [processes.start(*command, out=tmp_path / f"printed-{own['RANK']}", env=own) for own in ranks]
    codes = [process.wait() for process in running]
    printed = [(tmp_path / f"printed-{rank}").read_text(encoding="utf-8") for rank in (0, 1)]
    assert codes == [0, 0], "\n\n".join(printed)
    assert ["Load it with" in told for told in printed] == [True, False]
    assert np.abs(SentenceTransformer(str(out / "model"), device="cpu").encode(TEXTS) - one).max() < 1e-5
