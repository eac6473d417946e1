"""Bad input gets a sentence: what was given, what is allowed, what to do; at construction, or when it arrives."""

from __future__ import annotations

import contextlib
import json
import shutil

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer

from st_reba import CausalTransformer, EchoModule, ReBAModule, RefinedThoughtModule, TwinTower
from st_reba.modules import CausalModule

from .. import backbones
from ..catalogued import PUBLIC_MODULES
from ..conftest import paired, pipeline

REPETITIONS = r"give a whole number from {} to 1024, how often the text stands in the input\. 2 is the usual choice\."


@pytest.mark.parametrize(
    ("module_class", "settings", "message"),
    [
        (ReBAModule, {"repetitions": 0}, "repetitions=0: " + REPETITIONS.format(1)),
        (ReBAModule, {"repetitions": -3}, "repetitions=-3: " + REPETITIONS.format(1)),
        (ReBAModule, {"repetitions": 10**9}, "repetitions=1000000000: " + REPETITIONS.format(1)),
        (ReBAModule, {"repetitions": 2.5}, "repetitions=2.5: " + REPETITIONS.format(1)),
        (ReBAModule, {"repetitions": True}, "repetitions=True: " + REPETITIONS.format(1)),
        (EchoModule, {"repetitions": 1}, "repetitions=1: " + REPETITIONS.format(2)),
        (EchoModule, {"repetitions": 10**9}, "repetitions=1000000000: " + REPETITIONS.format(2)),
        (EchoModule, {"template": "{text}" * 1025}, "repetitions=1025: " + REPETITIONS.format(2)),
        (EchoModule, {"repetitions": "2"}, "repetitions='2': " + REPETITIONS.format(2)),
        (
            ReBAModule,
            {"repetitions": 300},
            r"leave no room for 300 copies of a text in the model's 256 positions\. Use fewer",
        ),
        (EchoModule, {"template": "{text}"}, r"'\{text\}' has 1 slots and repetitions=None: Echo needs .* at least 2"),
        (
            EchoModule,
            {"template": "{text}{text}", "repetitions": 3},
            "has 2 slots and repetitions=3: .* Leave one of the two",
        ),
        (
            EchoModule,
            {"template": "knowledge"},
            r"at least 2\. Repeat \{text\} in it, or .* CausalTransformer",
        ),
        (EchoModule, {"template": "no slot"}, r"'no slot' has no \{text\}\. A template is text with"),
        (EchoModule, {"template": "{text}{text.__class__}"}, r"has braces other than \{text\}"),
        (
            CausalTransformer,
            {"template": "{text}{text}"},
            "has 2 slots: CausalTransformer reads one copy. Use EchoModule",
        ),
        (CausalTransformer, {"template": "x " * 300 + "{text}"}, "leave no room for 1 copies"),
        (CausalTransformer, {"pool_over": "words"}, 'pool_over=\'words\': use "text", "all" or "whole"'),
        (EchoModule, {"pool_copies": "first"}, 'pool_copies=\'first\': use "last" or "repeated"'),
        (ReBAModule, {"pool_over": "all"}, "pool_over='all': ReBA has rows for text only; use \"text\""),
        (ReBAModule, {"rows": "first"}, 'rows=\'first\': use "all" for every token, or "last"'),
        (ReBAModule, {"layers": [3]}, r"layers=\[3\]: the model has 3 layers, so 3 is out of range; use -3 to 2"),
        (ReBAModule, {"layers": [0, -4]}, "so -4 is out of range; use -3 to 2"),
        (ReBAModule, {"layers": []}, r'layers=\[\]: use "all" or a list of layer indices'),
        (ReBAModule, {"layers": "last"}, "layers='last': use \"all\" or a list"),
        (ReBAModule, {"layers": 1}, 'layers=1: use "all" or a list'),
        (ReBAModule, {"layers": ["1"]}, r'layers=\[\'1\'\]: use "all" or a list'),
        (ReBAModule, {"normalize_weights": "yes"}, "normalize_weights='yes': use True or False"),
        (ReBAModule, {"chunk_length": 0}, "chunk_length=0: give the tokens of a chunk, 1 or more .* or None to read"),
        (ReBAModule, {"chunk_length": 12.0}, "chunk_length=12.0: give the tokens of a chunk, 1 or more"),
        (
            ReBAModule,
            {"chunk_length": 129},
            "chunk_length=129: 2 copies of a chunk and 0 tokens .* the model's 256 positions; use at most 128",
        ),
        (
            ReBAModule,
            {"chunk_length": 1, "repetitions": 257},
            "chunk_length=1: 257 copies of a chunk .* 256 positions; use fewer repetitions, or a shorter prompt",
        ),
        (
            ReBAModule,
            {"chunk_length": 8, "bidirectional_layers": 1},
            "chunk_length=8 with bidirectional_layers=1: where tokens see .* Leave one of the two out",
        ),
        (
            ReBAModule,
            {"backend": "onnx"},
            "backend='onnx': st_reba reads hidden states and attention; use backend=\"torch\"",
        ),
        (EchoModule, {"transformer_task": "fill-mask"}, "transformer_task='fill-mask': st_reba embeds text"),
    ],
)
def test_settings(module_class, settings, message, shared):
    with pytest.raises(ValueError, match=message):
        module_class(shared(), **settings)


@pytest.mark.parametrize("module_class", [CausalTransformer, EchoModule, ReBAModule])
def test_an_encoder_where_a_decoder_is_needed(module_class, tmp_path):
    import torch
    from transformers import AutoModel, BertConfig

    torch.manual_seed(0)
    model = AutoModel.from_config(BertConfig(**{**backbones.SIZE, **backbones.MLP}))
    path = backbones.save(model, tmp_path, "bert")
    with pytest.raises(ValueError, match="BertModel the first token's state changes .* needs a decoder-only"):
        module_class(path)


@pytest.mark.parametrize("module_class", [CausalTransformer, ReBAModule])
def test_a_loaded_transformer_that_ends_in_a_head(module_class, tmp_path):
    from sentence_transformers.base.modules import Transformer
    from transformers import AutoModelForCausalLM

    path = backbones.save(AutoModelForCausalLM.from_config(backbones.config("llama")), tmp_path)
    message = r"transformer_task='text-generation': .* Load it with transformer_task=\"feature-extraction\", or give"
    with pytest.raises(ValueError, match=message):
        module_class(Transformer(path, transformer_task="text-generation"))


def test_settings_are_checked_before_anything_is_loaded():
    """With a path that does not exist, the setting is what is complained about."""
    for module_class, settings in (
        (ReBAModule, {"repetitions": 0}),
        (ReBAModule, {"layers": []}),
        (EchoModule, {"template": "x"}),
        (CausalTransformer, {"pool_over": "x"}),
    ):
        with pytest.raises(ValueError, match="|".join(settings)):
            module_class("no/such/model", **settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"repetitions": 10**9}, "repetitions=1000000000"),
        ({"layers": [77]}, "77 is out of range"),
        ({"rows": "none"}, "rows='none'"),
    ],
)
def test_hostile_configurations_are_refused_on_loading(change, message, shared, tmp_path):
    pipeline(ReBAModule(shared())).save_pretrained(str(tmp_path))
    path = tmp_path / "0_ReBAModule" / "sentence_bert_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        SentenceTransformer(str(tmp_path), device="cpu")


@pytest.mark.parametrize("path", ["../../x", "1/../../x", "/etc", "C:\\x", "..\\x"])
def test_a_path_that_leads_out_of_the_model(path, shared, tmp_path):
    pipeline(ReBAModule(shared())).save_pretrained(str(tmp_path))
    said = 'a module lies inside its model, so give a relative path without "..", or "" for the model.s own directory.$'
    with pytest.raises(ValueError, match=f"modules.json has the path .*: {said}"):
        ReBAModule.load(str(tmp_path), subfolder=path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[0]["path"] = path
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match="path"):
        SentenceTransformer(str(tmp_path), device="cpu")


@pytest.mark.parametrize("item", [3, None, ("a", "b"), {"text": "a"}, {"prompt": None, "text": "a"}, b"a"])
def test_inputs_that_are_not_text(item, shared):
    with pytest.raises(ValueError, match=f"Input 1 is a {type(item).__name__}: EchoModule embeds strings"):
        EchoModule(shared()).preprocess(["a", item])


def test_a_prompt_that_leaves_no_room(shared):
    model = pipeline(EchoModule(shared()))
    with pytest.raises(
        ValueError, match=r"tokens of prompt.* leave no room for 2 copies .* shorter template or prompt"
    ):
        model.encode("a", prompt="word " * 300)


def test_a_prompt_that_chunks_have_no_room_for(shared):
    model = pipeline(ReBAModule(shared(), chunk_length=128))
    with pytest.raises(
        ValueError, match=r"chunk_length=128: 2 copies of a chunk and \d+ tokens of prompt .* use at most"
    ):
        model.encode("a", prompt="a few words")


def test_lengths(backbone_path):
    module = EchoModule(backbone_path())
    with pytest.raises(ValueError, match="max_seq_length=0: give a number of tokens, 1 or more"):
        module.max_seq_length = 0
    with pytest.raises(ValueError, match="max_length=0: give a number of tokens"):
        module.preprocess(["a"], processing_kwargs={"text": {"max_length": 0}})
    with pytest.raises(ValueError, match=r"has \['stride'\]: only max_length means something here"):
        module.preprocess(["a"], processing_kwargs={"text": {"stride": 2}})


WRONG_LENGTHS = [0, -1, 1.5, True, "512"]


class TestWrongLengths:
    """One sentence, wherever the number of tokens comes from."""

    @pytest.mark.parametrize(
        ("length", "module_class"), paired(WRONG_LENGTHS, [CausalTransformer, EchoModule, RefinedThoughtModule])
    )
    def test_given(self, length, module_class, backbone_path):
        with pytest.raises(ValueError, match=rf"^max_seq_length={length!r}: give a number of tokens, 1 or more"):
            module_class(backbone_path(), max_seq_length=length)

    @pytest.mark.parametrize("length", WRONG_LENGTHS)
    def test_set(self, length, shared):
        module = CausalTransformer(shared())
        with pytest.raises(ValueError, match=rf"^max_seq_length={length!r}: give a number of tokens"):
            module.max_seq_length = length
        with pytest.raises(ValueError, match=rf"^max_length={length!r}: give a number of tokens"):
            module.preprocess(["a"], processing_kwargs={"text": {"max_length": length}})

    @pytest.mark.parametrize("length", WRONG_LENGTHS)
    def test_saved(self, length, shared, tmp_path):
        pipeline(CausalTransformer(shared())).save_pretrained(str(tmp_path), create_model_card=False)
        path = tmp_path / "0_CausalTransformer" / "sentence_bert_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "max_seq_length": length}))
        with pytest.raises(ValueError, match=rf"^max_seq_length={length!r}: give a number of tokens"):
            SentenceTransformer(str(tmp_path), device="cpu")

    @pytest.mark.parametrize(("length", "loaded"), paired(WRONG_LENGTHS, [False, True]))
    def test_of_the_tokenizer(self, length, loaded, backbone_path, tmp_path):
        message = rf"^the tokenizer's model_max_length={length!r}: give a number of tokens"
        if loaded:
            module = CausalTransformer(backbone_path())
            module.tokenizer.model_max_length = length
            with pytest.raises(ValueError, match=message):
                EchoModule(module)
            return
        path = shutil.copytree(backbone_path(), tmp_path / "model") / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": length}))
        with pytest.raises(ValueError, match=message):
            CausalTransformer(str(path.parent))
        assert CausalTransformer(str(path.parent), max_seq_length=7).max_seq_length == 7

    @pytest.mark.parametrize("length", WRONG_LENGTHS[:2])
    def test_of_twin_towers(self, length, encoder_paths):
        with pytest.raises(ValueError, match=rf"^max_seq_length={length!r}: give a number of tokens"):
            TwinTower(*encoder_paths(), max_seq_length=length)


def test_nothing_to_preprocess(shared):
    assert EchoModule(shared()).preprocess([]) == {}
    assert len(pipeline(EchoModule(shared())).encode([])) == 0


@pytest.mark.parametrize("module_class", [each for each in PUBLIC_MODULES if issubclass(each, CausalModule)])
@pytest.mark.parametrize("value", [5, 5.5, 10**30, {"a": 1}, [None], b"x"], ids=str)
def test_a_setting_of_a_wrong_type_or_size(value, module_class, shared):
    """It is taken, or refused in a sentence; a saved model may give any."""
    for name in {*module_class.config_keys} - {*Transformer.config_keys}:
        with contextlib.suppress(ValueError):
            module_class(shared(), **{name: value})


@pytest.mark.parametrize("given", [{"sentences": ["a", "b\ud800"]}, {"sentences": ["a"], "prompt": "b\udfff"}])
def test_half_of_a_surrogate_pair(given, shallow_path):
    model = pipeline(ReBAModule(shallow_path))
    with pytest.raises(ValueError, match=r"half of a surrogate pair, '\\ud.*', as its character 2 of 2, which is no"):
        model.encode(**given)
