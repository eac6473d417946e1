"""A language model that others have loaded, the program or a module: its weights are shared, and it stays as it was."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import re
import threading
import warnings

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn
from transformers import AutoModelForCausalLM

import st_reba
from st_reba import CausalTransformer, EchoModule, PromptRepsModule, ReBAModule
from st_reba.hub import compat

from .. import backbones
from ..backbones import TEXTS
from ..conftest import pipeline, raising
from .methods import EACH_MODULE, RECIPES, read

CHAT = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</>{% endfor %}"


def language_model(name: str = "llama", **settings):
    """A tiny one with its head."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(backbones.config(name, **settings)).eval()


@pytest.fixture
def lm():
    return language_model()


@pytest.fixture
def tokenizer():
    return backbones.tokenizer()


def generated(lm, steps=24):
    ids = torch.arange(5, 15)[None]
    return lm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, do_sample=False, pad_token_id=0)


def kept(lm):
    """All that could be set on a model, besides its weights' values."""
    return {
        "configuration": copy.deepcopy(lm.config.to_dict()),
        "generation": str(getattr(lm, "generation_config", None)),
        "attention": lm.config._attn_implementation,
        "training": [module.training for module in lm.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in lm.modules()],
        "names": [sorted(vars(module)) for module in lm.modules()],
        "weights": [(id(weight), weight.data_ptr(), weight._version) for weight in lm.parameters()],
    }


ALONE = ["classical", "echo-2", "reba-2", "thought-2", "kv re-routing", "metaeol", "short"]


@pytest.mark.parametrize(
    ("name", "architecture"), [*((name, "llama") for name in ALONE), ("reba-2", "gpt2"), ("reba-2", "gemma2_softcap")]
)
def test_it_reads_as_if_it_were_loaded_by_its_path_and_nothing_of_the_model_changes(
    name, architecture, tokenizer, tmp_path
):
    lm = language_model(architecture)
    lm.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    kind, settings = RECIPES[name]
    before, tokens, state = kept(lm), generated(lm), tokenizer.__getstate__()
    module = kind(lm, tokenizer=tokenizer, **settings)
    found = pipeline(module).encode(TEXTS)
    np.testing.assert_allclose(found, pipeline(kind(str(tmp_path), **settings)).encode(TEXTS), atol=1e-6)
    for other, refused in ((ReBAModule, {"layers": [99]}), (EchoModule, {"output_layer": 99})):
        with pytest.raises(ValueError, match="layer"):
            other(lm, tokenizer=tokenizer, **refused)
    assert kept(lm) == before
    assert str(tokenizer.__getstate__()) == str(state)
    assert torch.equal(generated(lm), tokens)
    own = {weight.data_ptr() for weight in lm.parameters()}
    assert {weight.data_ptr() for weight in module.model.parameters()} <= own


TEXT_SIZES = {**backbones.SIZE, **backbones.MLP, **backbones.GROUPED, **backbones.IDS}
IMAGES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, **backbones.MLP, "image_size": 28}


TEXT_PARTS = [
    # A decoder beside a part for images; a body that is the model with its head; a body that wraps a decoder.
    ("Gemma3", {"text_config": TEXT_SIZES, "vision_config": IMAGES}, "Gemma3TextModel"),
    ("Llama4Text", {**TEXT_SIZES, "num_local_experts": 2, "intermediate_size_mlp": 48}, "Llama4TextModel"),
    ("Bart", {"vocab_size": 384, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4}, "BartDecoder"),
]


@pytest.mark.parametrize(("kind", "settings", "part"), TEXT_PARTS)
def test_the_part_that_reads_text_alone_is_taken(kind, settings, part, tokenizer):
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**settings))
    lm = backbones.randomize(whole.eval().float())
    module, seen = CausalTransformer(lm, tokenizer=tokenizer), []
    assert type(module.model).__name__ == part
    lm.get_output_embeddings().register_forward_pre_hook(lambda head, args: seen.append(args[0][0]))
    vectors = read(module, TEXTS)
    for text, vector in zip(TEXTS, vectors, strict=True):
        with torch.no_grad():
            lm(input_ids=torch.tensor([tokenizer(text)["input_ids"]]))
        torch.testing.assert_close(vector, seen[-1], rtol=1e-4, atol=1e-4)


def test_it_generates_in_another_thread_at_the_same_time(lm, tokenizer):
    tokens, found = generated(lm, 60), []
    model = pipeline(EchoModule(lm, tokenizer=tokenizer))
    alone = model.encode(TEXTS)
    thread = threading.Thread(target=lambda: found.append(generated(lm, 60)))
    thread.start()
    beside = [model.encode(TEXTS)]
    while thread.is_alive():
        beside.append(model.encode(TEXTS))
    thread.join()
    assert torch.equal(found[0], tokens)
    assert all(np.array_equal(each, alone) for each in beside)


def test_frequencies_that_follow_the_length_of_a_text_are_not_shared(tokenizer):
    """A long generation would turn the embeddings of texts, and the texts its tokens."""
    lm = language_model(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4})
    model = pipeline(CausalTransformer(lm, tokenizer=tokenizer))
    alone = model.encode(TEXTS)
    lm(torch.ones(1, 2 * backbones.POSITIONS, dtype=torch.long))
    assert np.array_equal(model.encode(TEXTS), alone)


def test_it_is_moved_and_cast_by_its_owner(lm, tokenizer):
    model = pipeline(CausalTransformer(lm, tokenizer=tokenizer))
    model.half()
    assert lm.dtype == model[0].model.dtype == torch.float32
    lm.double()
    assert model[0].model.dtype == torch.float64
    # So is one that is made on it, and a copy.
    for other in (EchoModule(model[0]), pickle.loads(pickle.dumps(model[0])), copy.deepcopy(model[0])):
        assert pipeline(other).half()[0].model.dtype == torch.float64


def test_a_model_in_training_is_read_in_evaluation(tokenizer):
    lm = language_model(attention_dropout=0.5).train()
    module = CausalTransformer(lm, tokenizer=tokenizer)
    first, second = (pipeline(module).encode(TEXTS) for _ in range(2))
    assert np.array_equal(first, second)
    assert all(part.training for part in lm.modules())


@pytest.mark.parametrize("way", ["torch.compile", "compile", "forward"])
def test_a_compiled_model_is_read_as_it_was(way, lm, tokenizer):
    expected = pipeline(CausalTransformer(lm, tokenizer=tokenizer)).encode(TEXTS)
    given = torch.compile(lm, backend="eager") if way == "torch.compile" else lm
    if way == "compile":
        lm.model.compile(backend="eager")
    elif way == "forward":
        lm.model.forward = torch.compile(lm.model.forward, backend="eager")
    assert np.array_equal(pipeline(CausalTransformer(given, tokenizer=tokenizer)).encode(TEXTS), expected)


class TestAdapters:
    @pytest.fixture
    def adapted(self, lm):
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        return peft.get_peft_model(lm, config).eval()

    def test_the_active_one_is_read_or_left_out(self, adapted, tokenizer):
        bare = pipeline(CausalTransformer(language_model(), tokenizer=tokenizer)).encode(TEXTS)
        found = pipeline(CausalTransformer(adapted, tokenizer=tokenizer)).encode(TEXTS)
        without = CausalTransformer(adapted, tokenizer=tokenizer, disable_adapter=True)
        assert np.array_equal(pipeline(without).encode(TEXTS), bare)
        merged = CausalTransformer(copy.deepcopy(adapted).merge_and_unload(), tokenizer=tokenizer)
        np.testing.assert_allclose(found, pipeline(merged).encode(TEXTS), atol=1e-6)
        # The model's own adapter is where it was.
        assert any("lora" in name for name, _ in adapted.named_parameters())

    def test_refusals(self, adapted, lm, tokenizer):
        peft = pytest.importorskip("peft")
        with pytest.raises(ValueError, match="this model has no adapter. Leave it out"):
            CausalTransformer(language_model(), tokenizer=tokenizer, disable_adapter=True)
        adapted.merge_adapter()
        with pytest.raises(ValueError, match=r"is merged into the weights of layers.0.self_attn.q_proj. Call unmerge"):
            CausalTransformer(adapted, tokenizer=tokenizer, disable_adapter=True)
        prompt = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
        prompted = peft.get_peft_model(language_model(), prompt)
        with pytest.raises(ValueError, match="is a learned prompt, which no recipe of st_reba can read"):
            CausalTransformer(prompted, tokenizer=tokenizer)


def test_refusals(lm, tokenizer, backbone_path):
    patched = language_model()
    patched.model.layers[1].forward = raising(AssertionError())
    for given, settings, message in [
        (lm, {}, "a loaded language model does not bring its tokenizer. Give it, such as"),
        (lm, {"tokenizer": "gpt2"}, "tokenizer='gpt2': a loaded language model does not"),
        (lm, {"tokenizer": tokenizer, "model_kwargs": {}}, "model_kwargs cannot be set on a language model"),
        (lm, {"tokenizer": tokenizer, "max_seq_length": 0}, "max_seq_length=0: give a number of tokens"),
        (nn.Linear(2, 2), {"tokenizer": tokenizer}, "A Linear was given: give a path, a Hub id, a language model"),
        (backbone_path(), {"tokenizer": tokenizer}, "tokenizer cannot be set on a path or Hub id"),
        (patched, {"tokenizer": tokenizer}, "layers.1 of this model has a forward that is not its class's own"),
        (backbones.encoder("bert"), {"tokenizer": tokenizer}, "it is an encoder"),
    ]:
        with pytest.raises(ValueError, match=message):
            CausalTransformer(given, **settings)


def test_build_takes_it_and_its_head(lm, tokenizer):
    """Nothing is read from a file: this model never was in one."""
    model = st_reba.build(lm, tokenizer=tokenizer, texts=[f"{text} {n}" for n in range(8) for text in TEXTS if text])
    assert type(model[0]).__name__ == "TopicModule"
    with pytest.raises(ValueError, match="device='cpu': a loaded language model stays where it is"):
        st_reba.build(lm, "classical", tokenizer=tokenizer, device="cpu")
    assert PromptRepsModule(lm, tokenizer=tokenizer).head.data_ptr() == lm.lm_head.weight.data_ptr()


def test_an_embedder_under_another_pooling_is_told(lm, tokenizer, tmp_path):
    """Its vectors would look sound: nothing else tells."""
    own = pipeline(CausalTransformer(lm, tokenizer=tokenizer))
    (tmp_path / "1_Pooling").mkdir()
    Pooling(own.get_embedding_dimension(), "lasttoken").save(str(tmp_path / "1_Pooling"))
    lm.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="was trained as an embedder that is pooled by lasttoken, as its 1_Pooling"):
        st_reba.build(loaded, "classical", tokenizer=tokenizer, pooling="mean")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        st_reba.build(loaded, "classical", tokenizer=tokenizer, pooling="last")


class TestConversations:
    MESSAGES = (
        {"role": "user", "content": "a dog"},
        {"role": "assistant", "content": "what of it"},
        {"role": "user", "content": [{"type": "text", "text": "it barks"}]},
    )

    @pytest.fixture
    def talking(self, tokenizer):
        tokenizer.chat_template = CHAT
        return tokenizer

    @pytest.mark.parametrize("name", ["classical", "prompted", "echo-2", "reba-2", "thought-2", "metaeol"])
    def test_a_turn_is_a_text_behind_what_was_said(self, name, lm, talking):
        kind, settings = RECIPES[name]
        model = pipeline(kind(lm, tokenizer=talking, **settings))
        before = "<user>a dog</><assistant>what of it</><user>"
        found = model.encode([list(self.MESSAGES)])
        np.testing.assert_allclose(found[0], model.encode("it barks", prompt=before), atol=1e-6)
        assert np.abs(found[0] - model.encode("it barks")).max() > 1e-4

    def test_a_conversation_is_a_text(self, lm, talking):
        model = pipeline(EchoModule(lm, tokenizer=talking, chat="conversation"))
        whole = "<user>a dog</><assistant>what of it</><user>it barks</>"
        # One conversation is one input, and a list of them are several; texts may stand among them.
        found = model.encode([list(self.MESSAGES), [self.MESSAGES[0]], "a text"])
        np.testing.assert_allclose(found, model.encode([whole, "<user>a dog</>", "a text"]), atol=1e-6)
        np.testing.assert_allclose(model.encode(list(self.MESSAGES)), found[0], atol=1e-6)

    def test_refusals(self, lm, talking):
        module = CausalTransformer(lm, tokenizer=talking)
        twice = copy.deepcopy(talking)
        twice.chat_template = CHAT + CHAT
        refusing = copy.deepcopy(talking)
        refusing.chat_template = "{{ raise_exception('roles must alternate') }}"
        image = [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}]
        for own, given, message in [
            (module, image, "a message has the content .*: st_reba reads text"),
            (CausalTransformer(lm, tokenizer=backbones.tokenizer()), [self.MESSAGES[0]], "has no chat template"),
            (CausalTransformer(lm, tokenizer=twice), [self.MESSAGES[0]], "writes the last message 2 times"),
            (CausalTransformer(lm, tokenizer=refusing), [self.MESSAGES[0]], "refuses the conversation: roles must alt"),
        ]:
            with pytest.raises(ValueError, match=f"(?i){message}"):
                own.preprocess([given])
        with pytest.raises(ValueError, match="chat='all': use 'turn' or 'conversation'"):
            CausalTransformer(lm, tokenizer=talking, chat="all")


@pytest.mark.filterwarnings("ignore:.*stands before Pooling")
@pytest.mark.parametrize("recipe", EACH_MODULE)
def test_a_module_takes_no_setting_from_the_one_that_it_shares(recipe, shared):
    kind, settings = RECIPES[recipe]
    other = EchoModule(shared(), pool_copies="repeated", rows="last", deterministic=True, final_norm=False)
    first, second = (kind(backbone, **settings) for backbone in (shared(), other))
    # The view of the backbone, what is looked up when it is first asked for, and where the weights came from.
    differ = {"_modules", "_places", "_unpad_inputs", "checkpoint", "lacking"}
    assert vars(first).keys() - differ == vars(second).keys() - differ
    assert first.get_config_dict() == second.get_config_dict()
    assert all(map(torch.equal, read(first, TEXTS), read(second, TEXTS)))


def test_the_list_of_what_is_shared_is_what_sts_transformer_sets(backbone_path):
    """Those that no backbone of this machine has it set are in its source alone."""
    listed = {*compat.SET_BY_TRANSFORMER}
    assert vars(Transformer(backbone_path())).keys() - vars(torch.nn.Module()).keys() <= listed
    source = inspect.getsource(Transformer)
    named = {name for name in re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", source) if not hasattr(Transformer, name)}
    assert named - {"model"} <= listed
    if compat.PLACEMENT_IS_KEPT:
        assert listed - named <= {"track_media_counts"}, "only versions before 6.2 set this"


@pytest.mark.parametrize("architecture", ["llama", "falcon"])
def test_a_module_leaves_the_backbone_as_it_was(architecture, backbone_path):
    backbone = Transformer(backbone_path(architecture))
    # In training, with a layer that its user froze.
    backbone.model.train()
    next(part for part in backbone.model.modules() if isinstance(part, nn.ModuleList))[1].eval()
    before = kept(backbone.model)
    for recipe, (kind, settings) in RECIPES.items():
        with contextlib.suppress(ValueError):  # what Falcon's own attention does not allow
            module = kind(backbone, **settings)
            assert {*map(id, module.model.parameters())} <= {*map(id, backbone.model.parameters())}
        assert kept(backbone.model) == before, recipe


def test_a_forward_that_is_the_models_alone_has_no_view(backbone_path):
    """A copy would run what it is a copy of."""
    shared = CausalTransformer(backbone_path())
    forward = shared.model.forward
    shared.model.forward = lambda **kwargs: forward(**kwargs)
    assert EchoModule(shared).model is shared.model
    with pytest.raises(ValueError, match="its forward is not its class's own: torch.compile leaves it so. Compile"):
        CausalTransformer(shared, output_layer=1)


def test_a_hook_whose_owner_cannot_be_copied(backbone_path):
    """It is called for the views that are made after it."""
    backbone, lock, seen = Transformer(backbone_path()), threading.Lock(), []
    backbone.model.layers[0].register_forward_hook(lambda *_: seen.append(lock))
    module = EchoModule(backbone)
    seen.clear()
    pipeline(module).encode(TEXTS[:1])
    assert len(seen) == 1
