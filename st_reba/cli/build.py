"""``st-reba build``."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from torch import nn

from ..data.demo import demo_sentences
from ..data.tables import read_texts
from ..files import whole_directory
from ..modules import (
    CausalModule,
    CausalTransformer,
    ContrastivePromptingModule,
    EarlyLateModule,
    EchoModule,
    HierarchicalTokenPrependingModule,
    KVReroutingModule,
    MetaEOLModule,
    PartwiseWhitening,
    ReBAModule,
    TokenPrependingModule,
    ValueAggregationModule,
)
from ..text.templates import PRESETS
from .common import Dtype, LengthOption, ModelOption, PoolingMode, app, check_file, clear_errors, console, load


class Method(str, Enum):
    classical = "classical"
    echo = "echo"
    reba = "reba"
    prompteol = "prompteol"
    metaeol = "metaeol"
    ck = "ck"
    kv_rerouting = "kv-rerouting"
    token_prepending = "token-prepending"
    hierarchical_token_prepending = "hierarchical-token-prepending"
    value_aggregation = "value-aggregation"
    contrastive_prompting = "contrastive-prompting"
    early_late = "early-late"


@app.command("build")
def build_command(
    model: ModelOption,
    out: Annotated[Path, typer.Option(help="Directory to write; it must not exist yet, or be empty.")],
    method: Annotated[Method, typer.Option(help="How the language model is read.")] = Method.reba,
    pooling: Annotated[PoolingMode, typer.Option(help="How token vectors become one.")] = PoolingMode.mean,
    repetitions: Annotated[int | None, typer.Option(help="Copies of the text (echo, reba). Default: 2.")] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help='Indices such as "-1,-2": the layers that count (reba, value-aggregation; default: all), or those '
            "that re-route (kv-rerouting; default: the middle third).",
            show_default=False,
        ),
    ] = None,
    chunk_length: Annotated[
        int | None, typer.Option(help="Tokens of a chunk, for texts too long to be repeated whole (reba).")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(help='Text with {text} slots, or a name such as "springer" (echo) or "prompteol" (prompteol).'),
    ] = None,
    fit_texts: Annotated[
        Path | None,
        typer.Option(
            help="Plain texts, one a line, some hundreds, that the whitening behind early-late is fitted on. "
            "Default: demo texts."
        ),
    ] = None,
    normalize: Annotated[bool, typer.Option(help="Scale vectors to length 1.")] = True,
    max_seq_length: LengthOption = None,
    dtype: Annotated[Dtype, typer.Option(help="Precision of the saved weights; auto: the model's own.")] = Dtype.auto,
) -> None:
    """Write a ready SentenceTransformer directory."""
    with clear_errors():
        mode = "lasttoken" if pooling is PoolingMode.last else pooling.value
        settings = _settings(method, mode, repetitions, layers, chunk_length, template)
        if dtype is Dtype.fastest:
            raise ValueError("--dtype fastest is for running a model: to save one, give float32, bfloat16 or float16.")
        texts = _fit_texts(method, fit_texts)
        with whole_directory(out) as scratch:
            module = load(_MODULES[method], model, max_seq_length, dtype, **settings)
            parts: list[nn.Module] = [module, Pooling(module.get_embedding_dimension(), mode)]
            if texts:
                parts.append(_whitening(parts, texts, default=fit_texts is None))
            built = SentenceTransformer(modules=[*parts, Normalize()] if normalize else parts, device="cpu")
            built.save_pretrained(str(scratch))
    console.print(f'Wrote {out}. Load it with: import st_reba; SentenceTransformer("{out}")', soft_wrap=True)


_MODULES: dict[Method, type[CausalModule]] = {
    Method.classical: CausalTransformer,
    Method.echo: EchoModule,
    Method.reba: ReBAModule,
    Method.prompteol: CausalTransformer,
    Method.metaeol: MetaEOLModule,
    Method.ck: MetaEOLModule,
    Method.kv_rerouting: KVReroutingModule,
    Method.token_prepending: TokenPrependingModule,
    Method.hierarchical_token_prepending: HierarchicalTokenPrependingModule,
    Method.value_aggregation: ValueAggregationModule,
    Method.contrastive_prompting: ContrastivePromptingModule,
    Method.early_late: EarlyLateModule,
}

# What a method is, beyond its module; options come on top.
_PRESETS: dict[Method, dict[str, object]] = {
    Method.prompteol: {"template": "prompteol"},
    Method.ck: {"templates": "ck"},
}

_WITHOUT_TEMPLATE = {
    Method.reba: "ReBA repeats the bare text",
    Method.metaeol: "MetaEOL brings its own eight",
    Method.ck: "CK is two prompts",
}

# Under these, a text of one's own is a prompt, too, and read as PromptEOL's is.
_PROMPTED = (
    Method.prompteol,
    Method.token_prepending,
    Method.value_aggregation,
    Method.contrastive_prompting,
    Method.early_late,
)


def _settings(
    method: Method,
    pooling: str,
    repetitions: int | None,
    layers: str | None,
    chunk_length: int | None,
    template: str | None,
) -> dict[str, object]:
    """The module's arguments; refuses options that the method does not have."""
    settings = dict(_PRESETS.get(method, {}))
    if method is Method.early_late and pooling != "mean":
        raise ValueError(
            f"--pooling {pooling}: early-late puts the mean of the text's tokens beside the end of a prompt; use "
            "--pooling mean, or leave it out."
        )
    if method is Method.reba:
        settings["rows"] = "last" if pooling == "lasttoken" else "all"
    if layers is not None:
        if method not in (Method.reba, Method.kv_rerouting, Method.value_aggregation):
            raise ValueError(
                f"--layers is for --method reba, kv-rerouting or value-aggregation; {method.value} has none to choose."
            )
        settings["layers"] = _layers(layers)
    if chunk_length is not None:
        if method is not Method.reba:
            raise ValueError(f"--chunk-length is for --method reba; {method.value} reads texts in one piece.")
        settings["chunk_length"] = chunk_length
    if repetitions is not None:
        if method not in (Method.echo, Method.reba):
            raise ValueError(f"--repetitions is for --method echo or reba; {method.value} reads one copy.")
        settings["repetitions"] = repetitions
    if template is not None:
        if method in _WITHOUT_TEMPLATE:
            why = _WITHOUT_TEMPLATE[method]
            raise ValueError(f"--template is for the methods that have one, such as classical or echo; {why}.")
        if method in _PROMPTED and template not in PRESETS:
            known = _MODULES[method].config_keys
            settings.update({name: value for name, value in PRESETS["prompteol"].reading().items() if name in known})
            if method is Method.early_late:
                # Its two halves are of the text and of the prompt's end, whatever the prompt.
                del settings["pool_over"]
        settings["template"] = template
    return settings


def _fit_texts(method: Method, path: Path | None) -> list[str]:
    """What the whitening behind early-late is fitted on; nothing for the other methods."""
    if method is Method.early_late:
        check_file(path, "--fit-texts")
        return demo_sentences() if path is None else read_texts(path)
    if path is not None:
        raise ValueError(
            f"--fit-texts is for --method early-late, whose halves are brought to one scale; {method.value} is built "
            "without a filter. In Python any filter can stand behind it, such as WhiteningTransform.fit(model, texts)."
        )
    return []


def _whitening(pooled: list[nn.Module], texts: list[str], default: bool) -> PartwiseWhitening:
    hint = ", sentences inside the package: give --fit-texts with some hundreds like your own" if default else ""
    console.print(f"Fitting the whitening on {len(texts)} texts{hint}.", soft_wrap=True)
    return PartwiseWhitening.fit(SentenceTransformer(modules=pooled, device="cpu"), texts)


def _layers(layers: str) -> str | list[int]:
    if layers == "all":
        return layers
    try:
        return [int(layer) for layer in layers.split(",")]
    except ValueError:
        raise ValueError(f'--layers {layers!r}: use "all" or indices separated by commas, such as "-1,-2".') from None
