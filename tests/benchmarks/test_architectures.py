"""Every recipe is right on every architecture of transformers, or refused in a sentence that names the class."""

from __future__ import annotations

import re

import pytest
import transformers
from packaging.version import Version

import architectures
import records
from st_reba import CausalTransformer
from st_reba.lm.attention.hooks import RunningMaximum

from .. import backbones

pytestmark = pytest.mark.filterwarnings("ignore")


def faults(name, *recipes):
    found = architectures.surveyed(name, recipes or architectures.RECIPES)
    return {recipe: own.sentence for recipe, own in found.items() if own.verdict == "fault"}


@pytest.mark.long
@pytest.mark.parametrize("name", architectures.names())
def test_every_recipe(name):
    assert faults(name) == {}


#: Those whose modules' names or masks lie: recipes that are right, and those that are refused, with what is said.
RIGHT = {
    # "linear" before the mixer is no feed-forward part; one norm is at both ends.
    "zamba2": ("prompteol",),
    "nanochat": ("classical@2", "early-late"),
    # A state space beside attention has the layer's number and a projection, too.
    "falcon_h1": ("prompteol", "value-aggregation"),
    # Some layers have no attention, or all share one number.
    "jamba": ("reba-2",),
    "zamba": ("classical",),
    # Each layer passes on four states a token; masks have weights; keys are selected by attention of its own.
    "gemma3n_text": ("classical", "reba-2"),
    "doge": ("reba-2",),
    "deepseek_v32": ("reba-2",),
    # Short models that end in a norm of another name, or in a layer with a window.
    "opt": ("classical@2",),
    "mpt": ("classical@2",),
    "gpt_oss": ("classical@2",),
}
NO_PROJECTION = "output projection of the attention in layer 3 of .* was not found"
MORE_THAN_INPUT = "reads more of a token than its input embedding, such as one"
#: What a prefix leaves is more than keys and values, or masks are not made of it.
NO_PAST = "further passes continue the keys and values of the text"
REFUSED = {
    ("blt", "all"): "The configuration of BltModel has no num_hidden_layers, so it is no stack",
    ("doge", "bidirectional"): "The masks of DogeModel add to the scores .* cannot be made to attend both ways",
    ("falcon_h1", "rt-2"): NO_PAST,
    ("gemma3n_text", "classical@2"): "cannot be shortened to 2 layers, because its layers were not found",
    ("gemma3n_text", "rt-2"): MORE_THAN_INPUT,
    ("gemma3n_text", "topic"): "The layers of Gemma3nTextModel were not found",
    ("gemma4_text", "rt-2"): MORE_THAN_INPUT,
    ("jamba", "kv-rerouting"): r"JambaModel in layers \[2\] cannot be re-routed: it is in layers \[1, 3\] alone",
    ("jetmoe", "value-aggregation"): NO_PROJECTION,
    ("llama4_text", "rt-2"): NO_PAST,
    ("mamba", "reba-2"): "MambaModel .* cannot be watched: it does not call transformers' attention",
    ("mamba", "value-aggregation"): NO_PROJECTION,
    ("phimoe", "rt-2"): NO_PAST,
    ("rwkv", "reba-2"): "cannot be watched",
    ("zamba", "reba-2"): "cannot be watched",
}
LIARS = {(name, recipe): "" for name, recipes in RIGHT.items() for recipe in recipes} | REFUSED


@pytest.mark.parametrize(("name", "recipe"), LIARS)
def test_parts_whose_names_lie(name, recipe):
    [(_, own)] = architectures.surveyed(name, [recipe]).items()
    said = LIARS[name, recipe]
    found = own.verdict == ("refused" if said else "right") and re.search(said, own.sentence)
    if not found and Version(transformers.__version__) < Version("5.20"):
        pytest.skip("an older transformers has it not, or builds it otherwise")
    assert found, own


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_keys_continue_a_past(name):
    model = architectures.build(name)
    assert CausalTransformer(model, tokenizer=backbones.tokenizer()).lm.continues_past


def test_a_fault_is_found(monkeypatch):
    symmetrised = RunningMaximum.symmetrised
    monkeypatch.setattr(RunningMaximum, "symmetrised", lambda hook: 1.001 * symmetrised(hook))
    assert [*faults("llama", "reba-2", "classical")] == ["reba-2"]
    monkeypatch.setattr(RunningMaximum, "symmetrised", lambda hook: 1 / 0)
    assert faults("llama", "reba-2") == {"reba-2": "ZeroDivisionError: division by zero"}


def test_the_file_has_no_fault():
    rows = records.read("architectures")
    assert {*rows["verdict"]} == {"right", "refused", "not built"}
    assert {*rows["recipe"]} == {*architectures.RECIPES, "all"}
    assert rows.filter(rows["sentence"] == "")["verdict"].unique().to_list() == ["right"]
