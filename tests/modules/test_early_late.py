"""Early and late: the words of an early layer, and the end of a prompt."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from transformers import OPTConfig, OPTModel

from st_reba import TEMPLATES, CausalTransformer, EarlyLateModule, IdfWeights, PartwiseWhitening, encode_words
from st_reba.text.templates import normalized

from .. import backbones, oracles
from ..backbones import TEXTS, third
from ..conftest import long, paired, pipeline, relative_error

TOLERANCE = 1e-5
CORPUS = [f"{number}: {text}" for number in range(8) for text in TEXTS]


@pytest.fixture(scope="session")
def expected(eager, token_ids):
    """``expected(text, architecture, layer)``: the vectors of the text's tokens by the oracle."""

    def vectors(text, architecture="llama", layer=1, **kwargs):
        before, behind = (token_ids(part) for part in TEMPLATES["prompteol"].split("{text}"))
        # The tokenizer of these tests has no token that goes across the marks around a text.
        own = token_ids(normalized(text))
        ids = [*before, *own, *behind]
        assert ids == token_ids(TEMPLATES["prompteol"].replace("{text}", normalized(text)))
        return oracles.early_and_late(
            eager(architecture), ids, slice(len(before), len(before) + len(own)), layer, **kwargs
        )

    return vectors


def whole(module, **kwargs) -> SentenceTransformer:
    """The module with all that belongs behind it."""
    pooled = pipeline(module)
    return SentenceTransformer(modules=[*pooled, PartwiseWhitening.fit(pooled, CORPUS, **kwargs)], device="cpu")


@pytest.mark.parametrize(("architecture", "layer"), paired(third(1), [1, 2]))
def test_oracle(architecture, layer, shared, expected):
    module = EarlyLateModule(shared(architecture), early_layer=layer)
    model = pipeline(module)
    tokens = model.encode(TEXTS, output_value="token_embeddings", batch_size=len(TEXTS))
    means = model.encode(TEXTS, batch_size=len(TEXTS))
    assert module.get_embedding_dimension() == means.shape[1] == 64
    for text, own, mean in zip(TEXTS, tokens, means, strict=True):
        vectors = expected(text, architecture, layer)
        assert relative_error(own, vectors) < TOLERANCE, text
        for half in (slice(32), slice(32, None)):
            assert relative_error(mean[half], vectors.mean(dim=0)[half]) < TOLERANCE, text


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
def test_the_last_layer_may_be_the_early_one(architecture, shared):
    """Before the final norm, where the late state comes behind it."""
    path = shared(architecture)
    found = pipeline(EarlyLateModule(path, early_layer=3)).encode(TEXTS)
    early = CausalTransformer(path, template="prompteol", pool_over="text", rows="all", final_norm=False)
    late = CausalTransformer(path, template="prompteol")
    parts = [pipeline(early).encode(TEXTS), pipeline(late, "lasttoken").encode(TEXTS)]
    assert relative_error(found, np.concatenate(parts, axis=1)) < TOLERANCE


def test_the_late_state_of_a_model_that_stops_early(shared, expected):
    module = EarlyLateModule(shared(), output_layer=2, final_norm=False)
    for text in TEXTS:
        vectors = expected(text, output_layer=2)
        assert relative_error(pipeline(module).encode(text, output_value="token_embeddings"), vectors) < TOLERANCE


def test_layers_that_attend_both_ways(shared):
    path = shared()
    found = pipeline(EarlyLateModule(path, bidirectional_layers=2)).encode(TEXTS, batch_size=len(TEXTS))
    plain = pipeline(EarlyLateModule(path)).encode(TEXTS)
    late = pipeline(CausalTransformer(path, template="prompteol", bidirectional_layers=2), "lasttoken").encode(TEXTS)
    assert relative_error(found[:, :32], plain[:, :32]) < TOLERANCE, "the first layer is causal still"
    assert relative_error(found[:, 32:], late) < TOLERANCE
    assert relative_error(late, plain[:, 32:]) > 1e-3


@pytest.mark.parametrize(
    ("layers", "output_layer", "early"), [(3, None, 1), (18, None, 2), long(30, None, 4), long(30, 15, 4), (30, 2, 2)]
)
def test_an_eighth_of_the_way_up(layers, output_layer, early, tmp_path):
    """Of the whole model, wherever it stops."""
    config = backbones.config("llama")
    config.num_hidden_layers = layers
    path = backbones.save(backbones.AutoModel.from_config(config), tmp_path)
    module = EarlyLateModule(path, output_layer=output_layer)
    assert (module.early_layer, len(module.model.layers)) == (early, output_layer or layers)


def test_a_template_brings_how_its_texts_are_read(roomy_path):
    module = EarlyLateModule(roomy_path, template="knowledge")
    assert (module.pool_over, module.normalize_text, module.output_layer, module.final_norm) == ("text", True, 2, False)
    assert not EarlyLateModule(roomy_path, template="{text} is").normalize_text


def test_a_prompt_is_context(shared, token_ids):
    item = pipeline(EarlyLateModule(shared())).encode("the cat", prompt="query: ", output_value=None)
    assert item["input_ids"].tolist() == token_ids(normalized("the cat"))


@pytest.mark.filterwarnings("ignore:A text without tokens")
def test_alone_and_in_a_batch_behind_its_whitening(shared):
    model = whole(EarlyLateModule(shared()))
    together = model.encode([*TEXTS, ""], batch_size=6)
    assert not together[-1].any()
    assert np.allclose(np.linalg.norm(together[:-1], axis=1), 1, atol=1e-6)
    for text, vector in zip(TEXTS, together, strict=False):
        assert relative_error(vector, model.encode(text)) < 1e-4


def test_half_precision_with_a_whitening_in_float32(backbone_path, shared):
    exact = whole(EarlyLateModule(shared()))
    half = EarlyLateModule(backbone_path(), model_kwargs={"dtype": "bfloat16"})
    model = SentenceTransformer(modules=[half, Pooling(64, "mean"), exact[2]], device="cpu")
    vectors = model.encode(TEXTS, convert_to_tensor=True)
    assert vectors.dtype == torch.bfloat16
    assert model[2].weight.dtype == torch.float32
    assert torch.cosine_similarity(vectors.float(), torch.tensor(exact.encode(TEXTS))).min() > 0.99


def test_save_load_and_pickle(backbone_path, tmp_path):
    model = whole(EarlyLateModule(backbone_path("gemma3"), early_layer=2))
    model = SentenceTransformer(modules=[*model, Normalize()], device="cpu")
    model.save_pretrained(str(tmp_path))
    for other in (SentenceTransformer(str(tmp_path), device="cpu"), pickle.loads(pickle.dumps(model))):
        assert [type(part) for part in other] == [EarlyLateModule, Pooling, PartwiseWhitening, Normalize]
        assert other[0].early_layer == 2
        assert np.array_equal(other.encode(TEXTS), model.encode(TEXTS))
    assert "EarlyLateModule → Pooling → PartwiseWhitening → Normalize" in (tmp_path / "README.md").read_text()


def test_two_threads_on_one_backbone(shared):
    backbone = CausalTransformer(shared())
    models = [pipeline(EarlyLateModule(backbone, early_layer=layer)) for layer in (1, 2, 3)]
    alone = [model.encode(TEXTS) for model in models]
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(model.encode, TEXTS) for _ in range(5) for model in models]
    for number, job in enumerate(jobs):
        assert np.array_equal(job.result(), alone[number % 3])


def test_gradients_are_those_of_the_definition(backbone_path, eager, token_ids):
    text = TEXTS[0]
    model = pipeline(EarlyLateModule(backbone_path(), early_layer=2)).train()
    model(model.preprocess([text]))["sentence_embedding"].sum().backward()
    reference = eager()
    reference.zero_grad()
    before, behind = (token_ids(part) for part in TEMPLATES["prompteol"].split("{text}"))
    own = token_ids(normalized(text))
    ids = torch.tensor([[*before, *own, *behind]])
    states = reference(input_ids=ids, output_hidden_states=True).hidden_states
    early = states[2][0, len(before) : len(before) + len(own)].mean(dim=0)
    torch.cat([early, states[-1][0, -1]]).sum().backward()
    for name in ("layers.0.mlp.up_proj", "layers.1.self_attn.v_proj", "layers.2.mlp.up_proj"):
        ours, expected = (model.get_submodule(name).weight.grad for model in (model[0].model, reference))
        assert relative_error(ours, expected) < 1e-4
    reference.zero_grad()


def test_gradient_checkpointing_is_refused(backbone_path):
    module = EarlyLateModule(backbone_path()).train()
    module.model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="Gradient checkpointing runs .* to train through EarlyLateModule"):
        module(module.preprocess(TEXTS))


def test_idf_weights_are_of_the_early_half(shared):
    module = EarlyLateModule(shared())
    plain = pipeline(module).encode(TEXTS)
    weights = IdfWeights.fit(module, CORPUS)
    weighed = SentenceTransformer(modules=[module, weights, Pooling(64, "mean")], device="cpu").encode(TEXTS)
    assert relative_error(weighed[:, 32:], plain[:, 32:]) < TOLERANCE
    assert relative_error(weighed[:, :32], plain[:, :32]) > 1e-3


def test_words_are_refused(shared):
    with pytest.raises(ValueError, match=r"same second half .* output_layer=1 and .*: it has no word embeddings"):
        encode_words(pipeline(EarlyLateModule(shared())), ["the cat"], ["cat"])


@pytest.mark.parametrize("pooling", ["lasttoken", "cls", "max"])
def test_another_pooling_is_warned_of(pooling, shared, tmp_path):
    with pytest.warns(
        UserWarning, match=rf'EarlyLateModule stands before Pooling\("{pooling}"\): .* Pooling\("mean"\)'
    ):
        pipeline(EarlyLateModule(shared()), pooling).save_pretrained(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"early_layer": 0}, "early_layer=0: LlamaModel runs 3 layers here; give .* 1 to 3, or None for an eighth"),
        ({"early_layer": 4}, "early_layer=4: LlamaModel runs 3 layers here"),
        ({"early_layer": 3, "output_layer": 2}, "early_layer=3: LlamaModel runs 2 layers here"),
        ({"early_layer": -1}, "early_layer=-1"),
        ({"early_layer": 1.0}, "early_layer=1.0"),
        ({"early_layer": True}, "early_layer=True"),
        ({"template": "{text}{text}"}, "has 2 slots: EarlyLateModule reads one copy"),
        ({"template": "springer"}, "has 2 slots"),
        ({"template": "in a word:"}, "text"),
        ({"pool_over": "all"}, 'pool_over=.all.: EarlyLateModule has vectors for text only; use "text"'),
        ({"bidirectional_layers": 4}, "bidirectional_layers=4"),
    ],
)
def test_wrong_settings(settings, message, shared):
    with pytest.raises(ValueError, match=message):
        EarlyLateModule(shared(), **settings)


def test_a_model_that_projects_its_last_states(tmp_path):
    """As OPT-350m does: half an embedding would be narrower."""
    sizes = {**backbones.SIZE, "ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False}
    model = OPTModel(OPTConfig(**backbones.IDS, **sizes, max_position_embeddings=backbones.POSITIONS))
    path = backbones.save(model, tmp_path)
    with pytest.raises(ValueError, match="from 32 values to 16, .*: use final_norm=False, which leaves the projection"):
        EarlyLateModule(path)
    assert pipeline(EarlyLateModule(path, final_norm=False)).encode(TEXTS).shape == (len(TEXTS), 64)
