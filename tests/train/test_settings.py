from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from st_reba.train import RunSettings, Settings, read_settings, setting


@dataclass(frozen=True, kw_only=True)
class Example(Settings):
    model: str
    rank: int = setting(32, least=1)
    rate: float = setting(2e-4, above=0)
    dropout: float = setting(0.1, least=0, below=1)
    layers: int | Literal["none", "all"] = 1
    modules: tuple[str, ...] | Literal["all-linear"] | None = None
    quick: bool = False


def write(tmp_path, text: str):
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_and_values(tmp_path):
    read = read_settings(
        write(tmp_path, "model: m\nrate: 1e-3\nlayers: all\nmodules: [q_proj, v_proj]\nquick: true\n"), Example
    )
    assert read == Example(model="m", rate=1e-3, layers="all", modules=("q_proj", "v_proj"), quick=True)
    assert read.rank == 32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds nothing, but it must hold lines such as model: org/name. Keys: model, rank,"),
        ("- a\n", "holds a list"),
        ("model: [\n", "config.yaml, line 2: this is not YAML (expected the node content, but found '<stream end>')."),
        ("model: m\nrnak: 3\n", "the key 'rnak' is unknown. Keys: model, rank, rate"),
        ("rank: 3\n", "the key 'model' is missing. Add a line model: VALUE."),
        ("model: m\nrank: 0\n", "rank: 0 was given: input should be at least 1."),
        ("model: m\nrank: 2.5\n", "rank: 2.5 was given: input should be a valid integer."),
        ("model: m\nrank: true\n", "rank: True was given: input should be a valid integer."),
        ("model: m\nrate: fast\n", "rate: 'fast' was given: input should be a valid number."),
        ("model: m\nrate: .nan\n", "rate: nan was given: input should be a finite number."),
        ("model: m\ndropout: 1\n", "dropout: 1 was given: input should be at least 0, below 1."),
        (
            "model: m\nlayers: some\n",
            "layers: 'some' was given: input should be a valid integer or input should be 'none' or 'all'.",
        ),
        (
            "model: m\nmodules: [1]\n",
            "modules: (1,) was given: input should be a valid string or input should be 'all-linear'.",
        ),
        ("model: m\nquick: 1\n", "quick: 1 was given: input should be a valid boolean."),
        ("model: 3\n", "model: 3 was given: input should be a valid string."),
    ],
)
def test_refusals_name_file_key_and_what_is_allowed(text, message, tmp_path):
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        read_settings(path, Example)
    assert str(path) in str(raised.value)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("word", "read"), [("no", "no"), ("yes", "yes"), ("2e-4", 2e-4), ("1", 1), (".5", 0.5), ("false", False)]
)
def test_words_and_numbers_are_those_of_yaml_1_2(word, read, tmp_path):
    path = write(tmp_path, f"arguments: {{}}\nmodel_kwargs: {{a: {word}}}\n")
    found = read_settings(path, RunSettings).model_kwargs["a"]
    assert (found, type(found)) == (read, type(read))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_settings(tmp_path / "none.yaml", Example)


def test_values_given_in_python_are_checked_too():
    with pytest.raises(ValueError, match="arguments: num_train_epochs: 0 was given: input should be above 0"):
        RunSettings(arguments={"num_train_epochs": 0})


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_range_holds_for_every_number(rate):
    if rate > 0:
        assert Example(model="m", rate=rate).rate == rate
    else:
        with pytest.raises(ValueError, match="above 0"):
            Example(model="m", rate=rate)
