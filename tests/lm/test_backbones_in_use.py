"""Backbones as people run them: in half precision, offloaded, split, quantised, adapted, compiled.

Each module is compared with the paper's algorithm, run eagerly on that very backbone. docs/backbones.md says the same
as a table.
"""

from __future__ import annotations

import contextlib
import functools
import shutil

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from torch import nn
from transformers import AutoModel

import st_reba
from st_reba.hub import compat
from st_reba.lm.attention import kernels
from st_reba.lm.model import LanguageModel

from .. import backbones, oracles
from ..backbones import DEMO_MODEL, TEXTS
from ..conftest import change, long, pipeline, relative_error, reloaded
from ..devices import CPU, FIRST, SECOND, SeveralDevices, put

RECIPES = {
    "reba, bidirectional": (st_reba.ReBAModule, {"bidirectional_layers": 1}),
    "thought": (st_reba.RefinedThoughtModule, {"iterations": 3}),
    "classical": (st_reba.CausalTransformer, {}),
    "classical, bidirectional": (st_reba.CausalTransformer, {"bidirectional_layers": 1}),
    "echo": (st_reba.EchoModule, {}),
}
#: The first changes masks and watches attention; the second reuses a cache. The others do less of the same.
both_recipes = pytest.mark.parametrize("recipe", ["reba, bidirectional", "thought"])
needs_placement = pytest.mark.skipif(not compat.PLACEMENT_IS_KEPT, reason="refused before sentence-transformers 6.2")
EXACT = 1e-5
FEW = ["the cat", TEXTS[2]]
#: A batch of several lengths.
SHORT = [TEXTS[2], TEXTS[1], TEXTS[3]]

PARTS = ("embed_tokens", "layers.0", "layers.1", "layers.2", "norm")
ON_DISK = {**dict.fromkeys(PARTS, "disk"), "rotary_emb": "cpu"}
HALF_ON_DISK = {**ON_DISK, "embed_tokens": "cpu", "layers.0": "cpu", "norm": "cpu"}


def make(recipe, source, **kwargs) -> SentenceTransformer:
    module_class, settings = RECIPES[recipe]
    return pipeline(module_class(source, **settings, **kwargs))


def expected(recipe, module):
    """Word embeddings of the first of :data:`FEW` by the algorithm of the paper, on the own backbone, run eagerly."""
    module_class, settings = RECIPES[recipe]
    model = module.model
    chosen = model.config._attn_implementation
    ids = module.tokenizer(FEW[0], add_special_tokens=False)["input_ids"]
    model.set_attn_implementation("eager")
    try:
        with oracles.both_ways(model, settings.get("bidirectional_layers", 0)):
            if module_class is st_reba.ReBAModule:
                return oracles.algorithm_2(model, ids, 2).float()
            if module_class is st_reba.RefinedThoughtModule:
                return oracles.refined_thought(model, [*ids, module.tokenizer.eos_token_id], 3).float()
            return oracles.echo(model, ids, 2 if module_class is st_reba.EchoModule else 1).float()
    finally:
        model.set_attn_implementation(chosen)


def check_saved(model, directory, **settings) -> SentenceTransformer:
    """A model gives the same to the bit when it is loaded again."""
    loaded = reloaded(model, directory, **settings)
    assert np.array_equal(loaded.encode(FEW), model.encode(FEW))
    return loaded


def words(model) -> torch.Tensor:
    """The same, as the model gives them, in a batch with a longer text."""
    return model.encode(FEW, output_value="token_embeddings")[0].float()


@pytest.fixture(scope="module")
def plain_words(backbone_path):
    """``plain_words(recipe)``: what the backbone gives as it is."""
    return functools.cache(lambda recipe: words(make(recipe, backbone_path())))


#: What the model is loaded with, and what that may change.
WAYS = {
    "bfloat16": ({"dtype": "bfloat16"}, 0.03),
    "float16": ({"torch_dtype": torch.float16, "low_cpu_mem_usage": True}, 0.005),
    "eager attention": ({"attn_implementation": "eager"}, EXACT),
    "device_map auto": ({"device_map": "auto"}, EXACT),
    "offloaded": ({"device_map": ON_DISK}, EXACT),
    "partly offloaded": ({"device_map": HALF_ON_DISK}, EXACT),
}


@pytest.mark.parametrize("way", WAYS)
@both_recipes
def test_ways_to_load(way, recipe, backbone_path, tmp_path):
    if "offloaded" in way and not compat.PLACEMENT_IS_KEPT:
        pytest.skip("refused before sentence-transformers 6.2")
    model_kwargs, tolerance = WAYS[way]
    model = make(recipe, backbone_path(), model_kwargs={**model_kwargs, "offload_folder": str(tmp_path)})
    assert ({parameter.device.type for parameter in model[0].model.parameters()} != {"cpu"}) == ("offloaded" in way)
    assert str(model[0].model.dtype) == f"torch.{way if '16' in way else 'float32'}"
    assert relative_error(words(model), expected(recipe, model[0])) < tolerance


#: Layers on two devices, placed and hooked by accelerate; see tests/devices.py for what stands in for a second.
SPLIT = {"embed_tokens": FIRST, "rotary_emb": FIRST, "layers.0": FIRST, "layers.1": SECOND, "layers.2": SECOND,
         "norm": SECOND}  # fmt: skip


@needs_placement
@pytest.mark.filterwarnings("error:The cache of .* cannot be reused")
@both_recipes
def test_split_over_devices(recipe, backbone_path):
    accelerate = pytest.importorskip("accelerate")
    plain = words(make(recipe, backbone_path("mistral_window")))
    with SeveralDevices():
        split = Transformer(backbone_path("mistral_window"))
        for name, device in SPLIT.items():
            put(split.model.get_submodule(name), device)
        places = {name: str(device) for name, device in SPLIT.items()}
        accelerate.dispatch_model(split.model, places, main_device=str(FIRST), skip_keys=["cache", "past_key_values"])
        model = make(recipe, split)
        assert {parameter.device for parameter in model[0].model.parameters()} == {FIRST, SECOND}
        assert model.device == FIRST
        embeddings = words(model)
    assert relative_error(embeddings, plain) < EXACT


class TestQuantized:
    """torchao's weights, on a CPU."""

    @pytest.fixture(scope="class")
    def torchao(self):
        if not compat.PLACEMENT_IS_KEPT:
            pytest.skip("sentence-transformers before 6.2 moves the model, which int8 weights refuse")
        return pytest.importorskip("torchao.quantization")

    def config(self, torchao, kind):
        if kind == "int8":
            return torchao.Int8WeightOnlyConfig()
        group = torchao.granularity.PerGroup(16)
        return torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group)

    QUANTIZED = [("int8", "float32", EXACT), ("int4", "float32", EXACT), ("int8", "bfloat16", 0.03)]

    @both_recipes
    @pytest.mark.parametrize(("kind", "dtype", "tolerance"), QUANTIZED)
    def test_on_loading(self, kind, dtype, tolerance, recipe, torchao, backbone_path, plain_words, tmp_path):
        config = transformers.TorchAoConfig(self.config(torchao, kind))
        model = make(recipe, backbone_path(), model_kwargs={"quantization_config": config, "dtype": dtype})
        assert "torchao" in type(model[0].model.layers[0].mlp.up_proj.weight).__module__
        assert relative_error(words(model), expected(recipe, model[0])) < tolerance
        assert relative_error(words(model), plain_words(recipe)) > 1e-4

        loaded = check_saved(model, tmp_path)
        assert "torchao" in type(loaded[0].model.layers[0].mlp.up_proj.weight).__module__

    @both_recipes
    def test_a_loaded_model_and_its_embeddings_which_is_not_saved(self, recipe, torchao, backbone_path, tmp_path):
        model = make(recipe, backbone_path())
        chosen = (nn.Linear, nn.Embedding)
        torchao.quantize_(model[0].model, self.config(torchao, "int4"), lambda part, name: isinstance(part, chosen))
        assert "torchao" in type(model[0].model.embed_tokens.weight).__module__
        assert relative_error(words(model), expected(recipe, model[0])) < EXACT
        with pytest.raises(ValueError, match=r"LlamaModel was quantised after it was loaded.* Quantise it on loading"):
            model[0].save(str(tmp_path))
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("way", ["path", "PeftModel", "load_adapter", "add_adapter"])
def test_adapted(way, backbone_path, plain_words, tmp_path):
    """LoRA, through peft; its directory has the adapter and the name of its backbone, as people publish them."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapter, recipe, transformer = tmp_path / "adapter", "reba, bidirectional", Transformer(backbone_path())
    torch.manual_seed(1)
    if way in ("path", "load_adapter"):
        transformer.model.add_adapter(lora)
        backbones.save(transformer.model, adapter)
    elif way == "PeftModel":
        transformer.model = peft.get_peft_model(transformer.model, lora)
    model = make(recipe, {"path": str(adapter), "PeftModel": transformer}.get(way, backbone_path()))
    if way == "load_adapter":
        model.load_adapter(str(adapter))
    elif way == "add_adapter":
        model.add_adapter(lora)
    found = words(model)
    assert relative_error(found, expected(recipe, model[0])) < EXACT
    assert relative_error(found, plain_words(recipe)) > 0.1
    check_saved(model, tmp_path / "saved")
    assert (tmp_path / "saved" / "adapter_model.safetensors").is_file()
    assert not list(tmp_path.rglob("model*.safetensors"))
    # Nothing that could be taken for a whole model.
    assert not (tmp_path / "saved" / "config.json").exists()


@pytest.mark.parametrize("recipe", ["classical", long("thought")])
def test_a_compiled_graph_never_decides_what_is_watched(recipe, shallow_path):
    """torch.compile, with a backbone of one layer: what takes time is tracing it."""
    torch.compiler.reset()
    model, graphs = make(recipe, shallow_path), []
    wanted = expected(recipe, model[0])

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    # One batch, whose sizes may be numbers: symbols take three times as long to trace.
    model[0].model = torch.compile(model[0].model, backend=keep, dynamic=False)
    assert relative_error(words(model), wanted) < EXACT
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    assert any("linear" in str(node.target) for node in nodes)
    assert not any("lm/attention/function" in (node.stack_trace or "") for node in nodes)
    # transformers' own attention, which nobody watches, is part of the one graph.
    assert (len(graphs) == 1) == (recipe == "classical")
    torch.compiler.reset()


def test_code_from_the_repository_runs_where_it_is_trusted(backbone_path, tmp_path, monkeypatch):
    path, trust = shutil.copytree(backbone_path(), tmp_path / "own"), {"trust_remote_code": True}
    (path / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaModel\n\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n\n"
        "class OwnModel(LlamaModel):\n    config_class = OwnConfig\n"
    )
    classes = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    change(path / "config.json", model_type="own", auto_map=classes)
    monkeypatch.setattr("transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE", 0)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        make("echo", str(path))
    model = make("echo", str(path), model_kwargs=trust, processor_kwargs=trust, config_kwargs=trust)
    assert type(model[0].model).__name__ == "OwnModel"
    assert relative_error(words(model), expected("echo", model[0])) < EXACT
    check_saved(model, tmp_path / "saved", **trust)
    assert (tmp_path / "saved" / "own.py").is_file()
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        SentenceTransformer(str(tmp_path / "saved"), device="cpu")


def test_a_model_that_accelerate_has_placed(backbone_path, tmp_path, monkeypatch):
    """Where it takes its input; it is not shortened; and before placement was kept, it is refused on two devices."""
    placed = AutoModel.from_pretrained(backbone_path(), device_map=ON_DISK, offload_folder=str(tmp_path))
    assert (placed.device.type, LanguageModel(placed).device) == ("meta", CPU)
    with pytest.raises(ValueError, match="because accelerate has placed it on its devices. Load it without device_map"):
        LanguageModel(placed, 1)
    module = st_reba.CausalTransformer(backbone_path())
    module.model.hf_device_map = {"layers.0": 0, "layers.1": "disk"}
    monkeypatch.setattr(compat, "PLACEMENT_IS_KEPT", False)
    with pytest.raises(ValueError, match=r"placed on 0, disk \(device_map\).* Use sentence-transformers 6\.2 or later"):
        st_reba.CausalTransformer(module)
    st_reba.CausalTransformer(backbone_path(), model_kwargs={"device_map": "auto"})


# In which dtype things are computed: under autocast, with another default dtype, in float64.

#: What computes with numbers that it makes itself, and what each kind of attention has of its own.
KINDS = {
    "reba, soft cap": ("gemma2_softcap", st_reba.ReBAModule, {}),
    "thought, window": ("mistral_window", st_reba.RefinedThoughtModule, {"iterations": 4}),
    "kv re-routing": ("gemma2_softcap", st_reba.KVReroutingModule, {"layers": [0, 1], "prefix_bias": 1.0}),
    "contrastive prompting": ("llama", st_reba.ContrastivePromptingModule, {"contrast_layer": 1}),
}


@pytest.fixture(scope="module")
def vectors(shared):
    """``vectors(case)``: a model, and what it gives in float32; made once."""

    @functools.cache
    def get(case):
        architecture, module_class, settings = KINDS[case]
        model = pipeline(module_class(shared(architecture), **settings))
        return model, model.encode(SHORT)

    return get


@pytest.mark.parametrize("case", KINDS)
def test_under_autocast_vectors_are_near(case, vectors, shared):
    """Whether the kernels were first tried outside autocast or within it."""
    model, wanted = vectors(case)
    architecture, module_class, settings = KINDS[case]
    in_bfloat16 = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    with in_bfloat16():
        # What a backbone can do is tried out when a module is made, and rounding must not change the answer.
        made = pipeline(module_class(shared(architecture), **settings))
    assert relative_error(made.encode(SHORT), wanted) < 1e-6
    for first_tried in (contextlib.nullcontext, in_bfloat16):
        kernels.trusted_kernel.cache_clear()
        with first_tried():
            model.encode(SHORT)
        with in_bfloat16():
            found = torch.from_numpy(model.encode(SHORT))
        assert (1 - torch.cosine_similarity(found, torch.from_numpy(wanted))).max() < 1e-2
    assert relative_error(model.encode(SHORT), wanted) < 1e-6


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(case, dtype, vectors, backbone_path):
    """Neither when a backbone is loaded, nor when a text is read."""
    architecture, module_class, settings = KINDS[case]
    try:
        torch.set_default_dtype(dtype)
        found = pipeline(module_class(backbone_path(architecture), **settings)).encode(SHORT)
    finally:
        torch.set_default_dtype(torch.float32)
    assert relative_error(found, vectors(case)[1]) < 1e-6


def test_nothing_is_rounded_to_float32_in_a_float64_model(backbone_path, token_ids):
    """Of GPT-2, transformers' own eager attention does not round either."""
    path = backbone_path("gpt2")
    plain = AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float64).eval()
    ids = token_ids(TEXTS[0])
    reba, thought = oracles.algorithm_2(plain, ids, 2), oracles.refined_thought(plain, [*ids, 0], 2)
    for module_class, states in ((st_reba.ReBAModule, reba), (st_reba.RefinedThoughtModule, thought)):
        model = pipeline(module_class(path, model_kwargs={"dtype": torch.float64}))
        found = model.encode(TEXTS[0], output_value="token_embeddings")
        assert states.dtype == torch.float64
        assert relative_error(found, states) < 1e-12


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_what_a_batch_changes_is_rounding(dtype, allowed):
    """The README says how much, on trained weights."""
    module = st_reba.ReBAModule(str(DEMO_MODEL), model_kwargs={"dtype": dtype})
    module.TOKENS_PER_THREAD = 2**20
    encode = pipeline(module).encode
    texts = [*TEXTS[1:4], "我爱自然语言处理。 " * 3]
    together = encode(texts, batch_size=len(texts), convert_to_tensor=True).float()
    alone = torch.stack([encode(text, convert_to_tensor=True).float() for text in texts])
    assert ((together - alone).norm(dim=1) / alone.norm(dim=1)).max() < allowed
