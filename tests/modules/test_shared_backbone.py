"""A module that is given a loaded backbone leaves it as it was: when it works, and when it refuses."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import threading

import pytest
import torch
from sentence_transformers.base.modules import Transformer

from st_reba import CausalTransformer, EchoModule, ReBAModule
from st_reba.hub import compat
from st_reba.lm.attention import function
from st_reba.lm.backbone import view

from ..backbones import TEXTS
from ..conftest import pipeline
from .methods import EACH_MODULE, RECIPES, read

#: On a backbone of three layers.
REFUSED = {
    "reba-2": {"layers": [99]},
    "classical": {"bidirectional_layers": 99},
    "short": {"output_layer": 99},
    "kv re-routing": {"layers": [99]},
    "token prepending": {"prepend_layers": 99},
    "contrastive prompting": {"contrast_layer": 99},
}


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


def everything_set_on(model) -> dict:
    """All that a constructor could have left: configuration, modes, parts."""
    modules = dict(model.named_modules())
    return {
        "config": model.config.to_dict(),
        "attention": [part.config._attn_implementation for part in modules.values() if hasattr(part, "config")],
        "modes": {name: part.training for name, part in modules.items()},
        "parts": {name: id(part) for name, part in modules.items()},
        "weights": {name: id(weight) for name, weight in model.named_parameters()},
    }


@pytest.mark.parametrize("architecture", ["llama", "falcon"])
def test_a_module_leaves_the_backbone_as_it_was(architecture, backbone_path):
    """When it works, and when it refuses; another one on it gives what it gave."""
    backbone = Transformer(backbone_path(architecture))
    plain = CausalTransformer(backbone)
    vectors = read(plain, TEXTS)
    # In training, with a layer that its user froze.
    backbone.model.train()
    next(part for part in backbone.model.modules() if isinstance(part, torch.nn.ModuleList))[1].eval()
    before = everything_set_on(backbone.model)
    for recipe, (kind, settings) in RECIPES.items():
        with contextlib.suppress(ValueError):  # what Falcon's own attention does not allow
            module = kind(backbone, **settings)
            assert {*map(id, module.model.parameters())} <= {*map(id, backbone.model.parameters())}
        if recipe in REFUSED:
            with pytest.raises(ValueError, match="layer|chunk|attention"):
                kind(backbone, **settings | REFUSED[recipe])
        assert everything_set_on(backbone.model) == before, recipe
    assert all(map(torch.equal, read(plain, TEXTS), vectors))


@pytest.mark.parametrize("kind", [CausalTransformer, EchoModule])
def test_classical_and_echo_keep_the_choice_of_attention(kind, backbone_path):
    """Beside a module that does not, whichever is made first."""
    first = kind(backbone_path(), model_kwargs={"attn_implementation": "eager"})
    reba = ReBAModule(first)
    found = [each.model.config._attn_implementation for each in (first, kind(first), reba, kind(reba))]
    assert found == ["eager", "eager", function.ATTENTION, function.ATTENTION]


def test_a_forward_that_is_the_models_alone_has_no_view(backbone_path):
    """A copy would run what it is a copy of."""
    shared = CausalTransformer(backbone_path())
    compiled = torch.compile(copy.deepcopy(shared.model), backend="eager")
    assert view(compiled) is compiled
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
