"""Bad input gets a sentence: what was given, what is allowed, what to do; at construction, or when it arrives."""

from __future__ import annotations

import shutil

import pytest
from sentence_transformers.base.modules import Transformer
from transformers import AutoModelForCausalLM

import st_reba
from st_reba.modules import CausalModule

from .. import backbones
from ..conftest import change, pipeline
from .methods import PUBLIC_MODULES, TWICE

REPETITIONS = r"give a whole number from {} to 1024, the number of copies of the text, such as 2\."
NO_ROOM = "leave no room for 1 copies of a text"

#: A module, settings, and what is said of them; the model has 3 layers and 256 positions.
REFUSED = [
    # Copies and templates
    (st_reba.ReBAModule, {"repetitions": 0}, "repetitions=0: " + REPETITIONS.format(1)),
    (st_reba.ReBAModule, {"repetitions": 300}, r"leave no room for 300 copies of a text in the model's 256"),
    (st_reba.EchoModule, {"template": "{text}"}, r"'\{text\}' has 1 slots and repetitions=None: give a template .* at"),
    (st_reba.EchoModule, {"template": "{text}{text}", "repetitions": 3}, "2 slots and repetitions=3: .* or leave one"),
    (st_reba.EchoModule, {"transformer_task": "fill-mask"}, "transformer_task='fill-mask': st_reba embeds text"),
    (st_reba.CausalTransformer, {"template": "{text}{text}"}, "CausalTransformer reads one copy of the text; use Echo"),
    (st_reba.CausalTransformer, {"template": "x " * 300 + "{text}"}, NO_ROOM),
    # Which vectors are handed on
    (st_reba.CausalTransformer, {"query_expansion": {"strategy": "fixed", "length": 8}}, "a causal language model was"),
    # ReBA
    (st_reba.ReBAModule, {"pool_over": "all"}, "pool_over='all': ReBAModule has 'text' alone; leave it out"),
    (st_reba.ReBAModule, {"layers": [3]}, r"layers=\[3\]: LlamaModel has 3 layers, use -3 to 2, not \[3\]"),
    (st_reba.ReBAModule, {"layers": []}, r'layers=\[\]: use "all" or a list of layer indices'),
    (st_reba.ReBAModule, {"backend": "onnx"}, "backend='onnx': st_reba reads hidden states and attention; use"),
    # Bidirectional layers
    (st_reba.BidirectionalLastLayer, {"bidirectional_layers": 0}, "bidirectional_layers=0: give 1 or more, or use"),
    (st_reba.BidirectionalLastLayer, {"bidirectional_layers": -1}, "bidirectional_layers=-1: give a whole number from"),
    (st_reba.EchoModule, {"bidirectional_layers": 10**30}, "give a whole number from 0 to 3"),
    (st_reba.NoSinkModule, {"layers": [2], "output_layer": 2}, r"layers=\[2\]: LlamaModel has 2 layers, use -2 to 1"),
    # Refined thought
    (st_reba.RefinedThoughtModule, {"iterations": 0}, "iterations=0: give a whole number of passes from 1 to 1024; 1"),
    (st_reba.RefinedThoughtModule, {"pool_over": "text"}, "pool_over='text': RefinedThoughtModule has 'all' alone"),
    # MetaEOL
    (st_reba.MetaEOLModule, {"templates": []}, r"templates=\[\]: give a list of 1 to 64 templates"),
    (st_reba.MetaEOLModule, {"templates": "kc"}, r"'kc': give a list .* or one of \['ck', 'ck-zh',"),
    (st_reba.MetaEOLModule, {"templates": ["x" * 40_000 + "{text}"] * 2}, "80,012 characters of templates were given,"),
    (st_reba.ReverseEOLModule, {"average": "no"}, "average='no': use True or False"),
    (st_reba.MetaEOLModule, {"pool_over": "text"}, "pool_over='text': MetaEOLModule has 'all' alone"),
    # KV re-routing
    (st_reba.KVReroutingModule, {"layers": []}, r"layers=\[\]: use .all. or a list of layer indices"),
    (st_reba.KVReroutingModule, {"prefix_bias": float("nan")}, "prefix_bias=nan: give a finite number; 0 changes no"),
    # Token prepending
    (st_reba.TokenPrependingModule, {"prepend_layers": 0}, "prepend_layers=0: give a number of layers from 1 to 3, or"),
    (st_reba.TokenPrependingModule, {"seed": -1}, "seed=-1: give a whole number from 0 to"),
    (st_reba.TokenPrependingModule, {"template": "{text}"}, r"give text with one \{prepend\} before \{text\}"),
    # Contrastive prompting
    (st_reba.ContrastivePromptingModule, {"contrast_layer": 3}, "contrast_layer=3: give the index of one of 3 layers"),
    (st_reba.ContrastivePromptingModule, {"auxiliary_template": "{prepend}{text}"}, r"nothing is prepended, so leave"),
    (st_reba.ContrastivePromptingModule, {"scale": 0}, 'scale=0: give a number above 0, or "norm"'),
    (st_reba.ContrastivePromptingModule, {"pool_over": "text"}, "ContrastivePromptingModule has 'all' alone; leave"),
    (st_reba.ContrastivePromptingModule, {"auxiliary_template": "{text}{text}"}, "reads one copy of the text; use"),
    # Early and late, topic, value aggregation
    (st_reba.EarlyLateModule, {"early_layer": 0}, "early_layer=0: give a layer from 1 to 3, or None for"),
    (st_reba.EarlyLateModule, {"pool_over": "all"}, "pool_over='all': EarlyLateModule has 'text' alone"),
    (st_reba.TopicModule, {"lower_layers": [0]}, r"lower_layers=\[0\]: give a list of at most 64 layers, each"),
    (st_reba.TopicModule, {"lower_layers": [4], "template": TWICE}, r"=\[4\]: give .* from 1 to 3, or -3 to -1"),
    (st_reba.TopicModule, {"tokenization": "whole"}, "tokenization='whole': the same tokens are put into several"),
    (st_reba.ValueAggregationModule, {"template": "{prepend}{text}"}, r"nothing is prepended, so leave \{prepend\}"),
    # Weights of the vocabulary's tokens
    (st_reba.PromptRepsModule, {"top_k": 0}, "top_k=0: give a whole number of 1 or more"),
    (st_reba.PromptRepsModule, {"pool_over": "text"}, "PromptRepsModule has 'all' alone"),
]  # fmt: skip


@pytest.mark.parametrize(("module_class", "settings", "message"), REFUSED)
def test_settings(module_class, settings, message, shared):
    with pytest.raises(ValueError, match=message):
        module_class(shared(), **settings)


def test_settings_are_checked_before_anything_is_loaded():
    """With a path that does not exist, the setting is what is complained about."""
    with pytest.raises(ValueError, match="layers"):
        st_reba.ReBAModule("no/such/model", layers=[])


@pytest.mark.parametrize("module_class", [each for each in PUBLIC_MODULES if issubclass(each, CausalModule)])
def test_a_setting_of_a_wrong_type_or_size(module_class, shared):
    """It is taken, or refused in a sentence that names it; a saved model may give any."""
    said, backbone = [], shared()
    for value in (5, 5.5, 10**30, {"a": 1}, [None], True, "x"):
        for name in {*module_class.config_keys} - {*Transformer.config_keys}:
            try:
                module_class(backbone, **{name: value})
            except ValueError as error:
                said.append((name, str(error)))
    assert len(said) > 30
    # Or what is wrong however it is set: a prompt too long for these models, no head, no words for choices.
    others = ("template", "leave no room", "language model's head", "choices")
    assert [name for name, message in said if not any(each in message for each in (name, *others))] == []


class TestBackbones:
    def test_a_loaded_transformer_that_ends_in_a_head(self, tmp_path):
        path = backbones.save(AutoModelForCausalLM.from_config(backbones.config("llama")), tmp_path)
        message = r"transformer_task='text-generation': .* Load it with transformer_task=\"feature-extraction\", or"
        with pytest.raises(ValueError, match=message):
            st_reba.ReBAModule(Transformer(path, transformer_task="text-generation"))

    @pytest.mark.parametrize("module_class", [st_reba.EarlyLateModule, st_reba.TopicModule])
    def test_one_that_projects_its_last_states(self, module_class, tmp_path):
        """As OPT-350m does: the parts of a vector would be of two widths."""
        model = backbones.backbone("opt", word_embed_proj_dim=16, do_layer_norm_before=False)
        path = backbones.save(model, tmp_path)
        message = "from 32 values to 16, .*: use final_norm=False, which leaves the projection"
        with pytest.raises(ValueError, match=message):
            module_class(path, template="{text} is")
        module = module_class(path, template="{text} is", final_norm=False)
        assert pipeline(module).encode("the cat").shape == (64,)

    def test_input_embeddings_that_do_more_than_look_up(self, backbone_path):
        source = st_reba.CausalTransformer(backbone_path())
        source.model.embed_tokens.register_forward_hook(lambda module, args, output: output.tanh())
        with pytest.raises(ValueError, match="The Embedding of LlamaModel does more than to multiply a table of input"):
            st_reba.TokenPrependingModule(source)


@pytest.mark.parametrize("item", [3, None, ("a", "b"), {"text": "a"}, {"prompt": None, "text": "a"}, b"a"])
def test_inputs_that_are_not_text(item, shared):
    with pytest.raises(ValueError, match=f"Input 1 of its batch is a {type(item).__name__}: EchoModule embeds strings"):
        st_reba.EchoModule(shared()).preprocess(["a", item])


def test_a_prompt_that_leaves_no_room(shared):
    with pytest.raises(ValueError, match=r"of prompt.* leave no room for 2 copies .* shorter template or prompt"):
        pipeline(st_reba.EchoModule(shared())).encode("a", prompt="word " * 300)


@pytest.mark.parametrize("length", [0, 1.5, True])
def test_wrong_lengths(length, shared, backbone_path, tmp_path):
    """One sentence, wherever the number of tokens comes from."""
    said = f"={length!r}: give a number of tokens, 1 or more"
    module = st_reba.CausalTransformer(shared())
    with pytest.raises(ValueError, match=f"^max_seq_length{said}"):
        module.max_seq_length = length
    with pytest.raises(ValueError, match=f"^max_length{said}"):
        module.preprocess(["a"], processing_kwargs={"text": {"max_length": length}})
    path = shutil.copytree(backbone_path(), tmp_path / "model") / "tokenizer_config.json"
    change(path, model_max_length=length)
    with pytest.raises(ValueError, match=f"^the tokenizer's model_max_length{said}"):
        st_reba.CausalTransformer(str(path.parent))
    assert st_reba.CausalTransformer(str(path.parent), max_seq_length=7).max_seq_length == 7


def test_lengths_of_others(backbone_path, encoder_paths):
    module = st_reba.EchoModule(backbone_path())
    with pytest.raises(ValueError, match=r"has \['stride'\]: use max_length alone"):
        module.preprocess(["a"], processing_kwargs={"text": {"stride": 2}})
    with pytest.raises(ValueError, match="^max_seq_length=0: give a number of tokens"):
        st_reba.TwinTower(*encoder_paths(), max_seq_length=0)


def test_nothing_to_preprocess(shared):
    assert st_reba.EchoModule(shared()).preprocess([]) == {}
    assert len(pipeline(st_reba.EchoModule(shared())).encode([])) == 0
