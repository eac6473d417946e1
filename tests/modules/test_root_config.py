"""``config.json`` in the root of a saved model: what programs that ask transformers for a language model are told."""

from __future__ import annotations

import json
import shutil

import numpy as np
import peft
import pytest
from huggingface_hub import ModelHubMixin
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoModel

from st_reba import EchoModule, WhiteningTransform
from st_reba.modules import AttentionReranker, AttentionRerankModule, EndpointTransformer

from ..backbones import TEXTS, own
from ..conftest import pipeline


def root_config(directory):
    return json.loads((directory / "config.json").read_text())


def test_programs_that_ask_for_a_language_model_are_told(backbone_path, tmp_path):
    model = pipeline(EchoModule(backbone_path()))
    model.save_pretrained(str(tmp_path))
    assert root_config(tmp_path)["model_type"] == "st_reba"
    said = (
        rf"^{tmp_path} is a SentenceTransformer of st_reba, not a language model: load it with SentenceTransformer"
        rf'\("{tmp_path}"\)\. Its language model is in the folder 0_EchoModule\.$'
    )
    for asking in (AutoModel.from_pretrained, CrossEncoder, Transformer):
        with pytest.raises(ValueError, match=said):
            asking(str(tmp_path))
    assert AutoModel.from_pretrained(str(tmp_path), subfolder="0_EchoModule") is not None
    expected = model.encode(TEXTS)
    np.testing.assert_array_equal(SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS), expected)
    # A recipe on a saved model has its language model.
    np.testing.assert_array_equal(pipeline(EchoModule(str(tmp_path))).encode(TEXTS), expected)
    # Of a model that was saved before there was such a file.
    (tmp_path / "config.json").unlink()
    np.testing.assert_array_equal(SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS), expected)


def test_other_first_modules(backbone_path, tmp_path):
    asks = EndpointTransformer("http://127.0.0.1:9", dimension=2, fingerprint=[1.0, 0.0])
    SentenceTransformer(modules=[asks], device="cpu").save_pretrained(str(tmp_path / "asks"))
    with pytest.raises(ValueError, match=r'SentenceTransformer\(".*asks"\)\.$'):
        AutoModel.from_pretrained(str(tmp_path / "asks"))
    ranker = AttentionReranker(modules=[AttentionRerankModule(backbone_path())], device="cpu")
    ranker.save_pretrained(str(tmp_path / "ranks"))
    with pytest.raises(ValueError, match=r"st_reba\.AttentionReranker\(\".*in the folder 0_AttentionRerankModule\.$"):
        AutoModel.from_pretrained(str(tmp_path / "ranks"))


def test_a_real_configuration_is_left(backbone_path, tmp_path):
    """Of a Transformer of sentence-transformers, and of a backbone with code of its own."""
    first = Transformer(backbone_path())
    first.tokenizer.pad_token = first.tokenizer.eos_token
    plain = SentenceTransformer(modules=[first, Pooling(first.get_embedding_dimension())], device="cpu")
    model = SentenceTransformer(modules=[*plain, WhiteningTransform.fit(plain, TEXTS * 9)], device="cpu")
    # A directory of ours before.
    pipeline(EchoModule(first)).save_pretrained(str(tmp_path))
    model.save_pretrained(str(tmp_path))
    assert root_config(tmp_path)["model_type"] == "llama"
    np.testing.assert_array_equal(SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS), model.encode(TEXTS))
    echo = EchoModule(backbone_path())
    echo.model.config.auto_map = {"AutoModel": "own.OwnModel"}
    pipeline(echo).save_pretrained(str(tmp_path / "code"))
    assert root_config(tmp_path / "code")["model_type"] == "llama"
    file = shutil.copytree(tmp_path / "code", tmp_path / "again") / "config.json"
    file.write_text('{"model_type": "other"}')
    pipeline(EchoModule(backbone_path())).save_pretrained(str(file.parent))
    assert root_config(file.parent) == {"model_type": "other"}


@pytest.mark.parametrize("before", [False, True])
def test_an_adapter_has_none(before, backbone_path, tmp_path):
    base = Transformer(backbone_path())
    if before:
        pipeline(EchoModule(backbone_path())).save_pretrained(str(tmp_path))
        shutil.rmtree(own(tmp_path))
    base.model = peft.get_peft_model(base.model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model = pipeline(EchoModule(base))
    model.save_pretrained(str(tmp_path))
    assert not (tmp_path / "config.json").exists()
    np.testing.assert_array_equal(SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS), model.encode(TEXTS))


class Classifier(ModelHubMixin):
    """As SetFit saves its model."""

    def __init__(self, body=None):
        self.body = body

    def _save_pretrained(self, save_directory):
        self.body.save(str(save_directory), create_model_card=False)

    @classmethod
    def _from_pretrained(cls, *, model_id, **kwargs):
        return cls(SentenceTransformer(model_id, device="cpu"))


def test_a_model_that_is_saved_through_a_mixin_of_the_hub(backbone_path, tmp_path):
    body = pipeline(EchoModule(backbone_path()))
    for _ in range(2):
        Classifier(body).save_pretrained(tmp_path)
        assert root_config(tmp_path)["model_type"] == "st_reba"
    np.testing.assert_array_equal(Classifier.from_pretrained(tmp_path).body.encode(TEXTS), body.encode(TEXTS))
