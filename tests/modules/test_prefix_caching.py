"""What stands before all texts is run once, and each text behind it is what it is behind the whole of it."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
from sentence_transformers import SentenceTransformer

from st_reba import CausalTransformer, EarlyLateModule, EchoModule
from st_reba.recipes import every_row

from ..backbones import TEXTS
from ..conftest import pipeline, relative_error
from .methods import TOLERANCE

pytestmark = pytest.mark.filterwarnings("ignore:A text without tokens")

#: Longer than the windows of the architectures that have them.
PROMPT = "Represent this sentence so that others are found that say the same: "
BATCH = [*TEXTS[:3], ""]


def encoded(module, texts=BATCH, prompt=PROMPT):
    return pipeline(module).encode(texts, prompt=prompt, batch_size=len(texts), convert_to_tensor=True)


@contextlib.contextmanager
def shapes_of(module):
    """The rows and columns of every pass in this block."""
    shapes = []
    embeddings = module.model.get_input_embeddings()
    hook = embeddings.register_forward_pre_hook(lambda table, args: shapes.append(tuple(args[0].shape)))
    try:
        yield shapes
    finally:
        hook.remove()


ROWS = {row.key: row for row in every_row()}
#: These read or change what stands before a text.
WHOLE = (
    "rt-2", "rt-4", "rt-8", "kv-rerouting", "no-sink", "bidirectional", "bidirectional-prompt", "echo-2-bidirectional",
    "reba-2-bidirectional",
)  # fmt: skip


@pytest.mark.parametrize("key", ROWS)
def test_every_recipe(key, roomy_path):
    backbone, row = CausalTransformer(roomy_path), ROWS[key]
    module = row.build(backbone)
    expected = encoded(row.build(backbone, prefix_caching=False))
    assert relative_error(encoded(module), expected) < TOLERANCE
    # Again, with what is kept.
    assert relative_error(encoded(module), expected) < TOLERANCE
    assert bool(module.lm.prefixes) == module.caches_prefixes == (key not in WHOLE)


def test_a_prompt_is_run_once(shared, token_ids):
    module = EarlyLateModule(shared())
    # Tried once.
    assert module.lm.continues_past
    prefix = len(token_ids('This sentence : "'))
    with shapes_of(module) as shapes:
        encoded(module, TEXTS, "")
        encoded(module, TEXTS[:2], "")
        encoded(module, TEXTS[:1], "")
    assert shapes[0] == (1, prefix)
    whole = [module.preprocess(texts)["input_ids"].shape for texts in (TEXTS, TEXTS[:2], TEXTS[:1])]
    assert shapes[1:] == [(rows, columns - prefix) for rows, columns in whole]


def test_it_is_neither_copied_nor_pickled_nor_saved(backbone_path, tmp_path):
    model = pipeline(EchoModule(backbone_path()))
    vectors = model.encode(BATCH, prompt=PROMPT)
    assert model[0].lm.prefixes
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not other[0].lm.prefixes
        assert relative_error(other.encode(BATCH, prompt=PROMPT), vectors) < TOLERANCE
    model.save_pretrained(str(tmp_path))
    assert SentenceTransformer(str(tmp_path), device="cpu")[0].prefix_caching


@pytest.mark.parametrize("write", ["in place", "loaded anew", "rounded"])
def test_other_weights_have_other_prefixes(write, backbone_path):
    """Of a weight of the backbone, which another module may write, or of the module."""
    backbone = CausalTransformer(backbone_path())
    module = CausalTransformer(backbone, template="prompteol")
    before = encoded(module, TEXTS)
    if write == "in place":
        backbone.model.layers[0].self_attn.k_proj.weight.detach().mul_(2)
    elif write == "loaded anew":
        module.load_state_dict({name: weight * 1.5 for name, weight in module.state_dict().items()})
    else:
        module.half().float()
    after = encoded(module, TEXTS)
    assert not torch.equal(before, after)
    module.prefix_caching = False
    assert relative_error(after, encoded(module, TEXTS)) < TOLERANCE


def test_with_an_adapter_prompts_are_run_whole(backbone_path):
    peft = pytest.importorskip("peft")
    module = CausalTransformer(backbone_path(), template="prompteol")
    expected = encoded(module)
    module.model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    assert not torch.allclose(encoded(module), expected)
    module.model.disable_adapters()
    with shapes_of(module) as shapes:
        assert relative_error(encoded(module), expected) < TOLERANCE
    assert {rows for rows, _ in shapes} == {len(BATCH)}
