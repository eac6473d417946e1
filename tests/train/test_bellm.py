"""BeLLM: what is built and trained, on weights of few bits too, by one process or several, and from a checkpoint."""

from __future__ import annotations

import json
import os
import socket

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from transformers import TorchAoConfig, set_seed

from st_reba import TEMPLATES, BidirectionalLastLayer, CausalTransformer
from st_reba.hub.push import check_saved_model
from st_reba.train import BeLLMTraining, add_lora, bellm, build_bellm, train_bellm

from .. import processes
from ..backbones import TEXTS
from ..conftest import long, relative_error
from .stopping import stop

pytest.importorskip("peft")


@pytest.fixture
def given(backbone_path, tmp_path):
    """Settings by name."""
    path = tmp_path / "triplets.tsv"
    rows = [
        f"{text} {n}\t{text} again {n}\t{TEXTS[(i + 2) % 5]} not {n}" for n in range(2) for i, text in enumerate(TEXTS)
    ]
    path.write_text("\n".join(rows), encoding="utf-8")
    usual = {"per_device_train_batch_size": 4, "learning_rate": 1e-2}
    return lambda changes=(), **arguments: {
        "model": backbone_path(), "triplets": str(path), "rank": 4, **dict(changes),
        "arguments": {**usual, **arguments},
    }  # fmt: skip


@pytest.fixture
def settings(given):
    return lambda changes=(), **arguments: BeLLMTraining(**given(changes, **arguments))


@pytest.fixture
def shallow(settings, shallow_path):
    """The same of a model of one layer, for what a run does around it."""
    return lambda changes=(), **arguments: settings({"model": shallow_path, **dict(changes)}, **arguments)


@pytest.mark.parametrize(
    ("layers", "module_class", "count"),
    [("none", CausalTransformer, 0), (0, CausalTransformer, 0), ("last", BidirectionalLastLayer, 1),
     (2, BidirectionalLastLayer, 2), ("all", BidirectionalLastLayer, 3)],
)  # fmt: skip
def test_table_4(layers, module_class, count, settings):
    module = build_bellm(settings({"bidirectional_layers": layers}))[0]
    assert type(module) is module_class
    assert (module.bidirectional_layers, module.pool_over) == (count, "all")
    assert module.template == 'The representative word for sentence {text} is:"'
    # Every token, as the authors' command averages; and a template's name is its text, however others read it.
    changes = {"bidirectional_layers": layers, "pool_over": "whole", "template": "knowledge"}
    module = build_bellm(settings(changes))[0]
    assert (module.pool_over, module.rows, module.normalize_text) == ("whole", "all", False)
    assert (module.output_layer, module.final_norm, module.template) == (None, True, TEMPLATES["knowledge"])


def test_the_last_layer_is_felt_where_more_than_the_last_token_is_read(settings):
    """The last token sees all others in any case, so that Table 4's first two rows are one model there."""

    def embedded(layers, pooling="mean"):
        return build_bellm(settings({"bidirectional_layers": layers, "pooling": pooling})).encode(TEXTS)

    assert np.abs(embedded("none") - embedded("last")).max() > 1e-3
    none = embedded("none", "lasttoken")
    with pytest.warns(UserWarning, match='reads the last token alone, which sees all others .* Use pooling="mean"'):
        last = embedded("last", "lasttoken")
    assert np.abs(none - last).max() < 1e-6
    assert np.abs(none - embedded("all", "lasttoken")).max() > 1e-3


@pytest.mark.parametrize("architecture", ["llama", "gpt2", *map(long, ["phi3", "gpt_neox", "gemma3"])])
def test_every_linear_layer_is_adapted_and_nothing_else_is_trained(architecture, settings, backbone_path):
    model = build_bellm(settings({"model": backbone_path(architecture)}))
    add_lora(model, settings())
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    adapted = {name.partition(".lora_")[0] for name in trained}
    kinds = {type(module).__name__ for name, module in model.named_modules() if name in adapted}
    assert kinds == {"Linear"}
    left = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear and "lora" not in name}
    assert all(name.endswith("base_layer") for name in left)


def test_layers_that_are_not_there(settings):
    model = build_bellm(settings())
    with pytest.raises(ValueError, match=r"""peft cannot adapt LlamaModel .*Use "all-linear", or the names"""):
        add_lora(model, settings({"target_modules": ("nowhere",)}))


@pytest.mark.parametrize("layers", ["last", long("none")])
def test_adapter_and_merged_model_are_one(layers, settings, tmp_path, monkeypatch):
    given = settings({"bidirectional_layers": layers})
    before = build_bellm(given).encode(TEXTS)
    merged = train_bellm(given, tmp_path / "run", progress=False)
    embeddings = merged.encode(TEXTS)
    assert np.abs(embeddings - before).max() > 1e-2
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, rtol=1e-5)

    monkeypatch.chdir(tmp_path)
    whole = SentenceTransformer("run/model", device="cpu")
    adapter = SentenceTransformer("run/adapter", device="cpu")
    assert np.array_equal(whole.encode(TEXTS), embeddings)
    assert np.abs(adapter.encode(TEXTS) - embeddings).max() < 1e-5
    assert all(parameter.requires_grad for parameter in merged.parameters()), "it can be trained on"
    assert not any("lora" in name for name, _ in merged.named_parameters())
    for model in (whole, adapter):
        assert model[0].bidirectional_layers == int(layers == "last")
    assert (tmp_path / "run/adapter/adapter_model.safetensors").is_file()
    assert not list((tmp_path / "run/adapter").glob("model*.safetensors"))
    assert not list((tmp_path / "run/model").glob("adapter*"))
    for saved in ("model", "adapter"):
        modules = json.loads((tmp_path / "run" / saved / "modules.json").read_text())
        assert [module["type"].rpartition(".")[2] for module in modules] == [
            type(whole[0]).__name__, "Pooling", "Normalize"
        ]  # fmt: skip


def test_gradient_checkpointing_changes_no_gradient(settings):
    """All layers are turned when they run again, too; the adapter has a gradient, though the embeddings have none."""
    gradients = []
    for checkpointing in (False, True):
        model = build_bellm(settings({"bidirectional_layers": "all"}))
        set_seed(0)
        add_lora(model, settings({"dropout": 0.0}))
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train()
        embeddings = model(model.preprocess(TEXTS))["sentence_embedding"]
        (embeddings @ torch.linspace(-1, 1, embeddings.shape[1])).sum().backward()
        found = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
        gradients.append(torch.cat([gradient.flatten() for gradient in found.values()]))
    assert gradients[0].norm() > 1e-2
    assert relative_error(*gradients) < 1e-5


def test_pushing(shallow, tmp_path):
    """The merged model can be; the adapter once its backbone has a name that others know."""
    train_bellm(shallow(max_steps=1), tmp_path, progress=False)
    check_saved_model(tmp_path / "model")
    with pytest.raises(ValueError, match=r"is an adapter on .*, which is a directory of this machine: nobody else"):
        check_saved_model(tmp_path / "adapter")
    config = tmp_path / "adapter/adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "Qwen/Qwen3-0.6B"}))
    check_saved_model(tmp_path / "adapter")


def test_it_learns_and_says_so(shallow, tmp_path):
    """Evaluated as it goes; what was asked is what was done."""
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("one\ttwo\t1\nthree\tfour\t2\nfive\tsix\t4\n")
    given = shallow({"evaluation": str(pairs), "temperature": 0.1}, max_steps=2, eval_steps=1)
    train_bellm(given, tmp_path / "run", progress=False)
    states = sorted((tmp_path / "run/checkpoints").glob("checkpoint-*/trainer_state.json"))
    log = json.loads(states[-1].read_text())["log_history"]
    assert [entry["step"] for entry in log if "eval_spearman_cosine" in entry] == [1, 2]
    run = json.loads((tmp_path / "run/checkpoints/run.json").read_text())
    assert (run["temperature"], run["rank"], run["loss"]) == (0.1, 4, "MultipleNegativesRankingLoss")


def test_what_a_stopped_run_goes_on_as(shallow, tmp_path, monkeypatch):
    """Not as one of another rank, nor with a model that changed in its place: the checkpoints hold the adapter alone.
    But with data that have moved. LoRA's weights are float32 and stay so, whatever the backbone's are."""
    half, run = {"model_kwargs": {"dtype": "bfloat16"}}, {"num_train_epochs": 2, "save_steps": 2}
    straight = train_bellm(shallow(half, **run), tmp_path / "straight", progress=False)
    stop(train_bellm, shallow(half, **run), tmp_path / "broken", 3)
    with pytest.raises(ValueError, match="a run with rank=4, but now it is rank=8"):
        train_bellm(shallow({**half, "rank": 8}, **run), tmp_path / "broken", progress=False)

    def changed(given):
        model = build_bellm(given)
        with torch.no_grad():
            model[0].model.layers[0].mlp.up_proj.weight[3, 5] *= 1 + 2**-6
        return model

    with monkeypatch.context() as patch:
        patch.setattr(bellm, "build_bellm", changed)
        with pytest.raises(ValueError, match="a run with other frozen weights, but now it is other frozen weights"):
            train_bellm(shallow(half, **run), tmp_path / "broken", progress=False)
    moved = (tmp_path / "triplets.tsv").rename(tmp_path / "moved.tsv")
    resumed = train_bellm(shallow({**half, "triplets": str(moved)}, **run), tmp_path / "broken", progress=False)
    assert resumed[0].model.dtype == torch.bfloat16
    assert torch.equal(resumed.encode(TEXTS, convert_to_tensor=True), straight.encode(TEXTS, convert_to_tensor=True))
    file = "adapter/adapter_model.safetensors"
    expected, weights = (load_file(tmp_path / name / file) for name in ("straight", "broken"))
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


def test_adapter_and_merged_model_are_close_on_weights_of_few_bits(settings, tmp_path):
    """By torchao on a CPU; what is merged is the backbone as it was."""
    quantization = pytest.importorskip("torchao.quantization")
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    coarse = settings({"model_kwargs": {"quantization_config": config}}, num_train_epochs=3, report_to="none")
    before = build_bellm(coarse)
    assert "torchao" in type(before[0].model.layers[0].mlp.up_proj.weight).__module__
    merged = train_bellm(coarse, tmp_path / "run", progress=False)
    assert type(merged[0].model.layers[0].mlp.up_proj.weight).__module__.startswith("torch.nn")
    whole, adapter = (
        SentenceTransformer(str(tmp_path / "run" / name), device="cpu").encode(TEXTS) for name in ("model", "adapter")
    )
    assert np.array_equal(whole, merged.encode(TEXTS))
    assert np.abs(whole - adapter).max() < 0.1 * np.abs(whole - before.encode(TEXTS)).max()


def free_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


@pytest.fixture
def launched(given, shallow_path):
    """Settings of a run that several processes share, by the rows of a device's batch: SGD, so that a weight moves as
    far as its gradient says."""
    fixed = {"model": shallow_path, "dropout": 0.0, "angle_weight": 0.1}
    return lambda batch, **more: given(
        fixed, per_device_train_batch_size=batch, optim="sgd", learning_rate=0.5, dataloader_drop_last=True,
        batch_sampler="batch_sampler", use_cpu=True, report_to="none", num_train_epochs=1, **more,
    )  # fmt: skip


def test_two_processes_are_one(launched, tmp_path):
    """Negatives are those of both, and so is the angle loss; the gradient is that of the whole batch."""
    alone, out = BeLLMTraining(**launched(4)), tmp_path / "two"
    before = build_bellm(alone).encode(TEXTS)
    one = train_bellm(alone, tmp_path / "one", progress=False).encode(TEXTS)

    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(launched(2)), encoding="utf-8")
    env = {
        **os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    command = ["train", "bellm", "--config", tmp_path / "settings.yaml", "--out", out]
    running = [
        processes.start(
            "-c", "import runpy; runpy.run_module('st_reba', run_name='__main__')", *command,
            out=tmp_path / f"printed-{rank}", env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    codes = [process.wait() for process in running]
    printed = [(tmp_path / f"printed-{rank}").read_text(encoding="utf-8") for rank in (0, 1)]
    # One that fails takes the other with it: what both printed tells which was first.
    assert codes == [0, 0], "\n\n".join(printed)
    assert ["Load it with" in told for told in printed] == [True, False]
    two = SentenceTransformer(str(out / "model"), device="cpu").encode(TEXTS)
    assert np.abs(one - before).max() > 1e-2
    assert np.abs(two - one).max() < 1e-5
    run = json.loads((out / "checkpoints/run.json").read_text(encoding="utf-8"))
    assert (run["per_device_train_batch_size"], run["devices"]) == (2, 2)


def test_a_checkpoint_is_written_by_one(launched, tmp_path, monkeypatch):
    """What is written by several at once may be read half-written."""
    monkeypatch.setattr(SentenceTransformerTrainingArguments, "should_save", False)
    train_bellm(BeLLMTraining(**launched(4, save_steps=1, max_steps=1)), tmp_path / "run", progress=False)
    (checkpoint,) = (tmp_path / "run/checkpoints").glob("checkpoint-1")
    assert not (checkpoint / "modules.json").exists()
