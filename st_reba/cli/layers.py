"""``st-reba layers``."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text
from scipy.stats import ConstantInputWarning
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.modules import Pooling

from ..data.demo import DEMO_MODEL, DEMO_PAIRS
from ..data.tables import read_pairs
from ..evaluation import DependencyEvaluator, TurningPointEvaluator
from ..files import check_file, whole_directory
from ..modules import CausalTransformer, EchoModule
from ..optional import require_matplotlib
from ..text.templates import Template
from .common import (
    DeviceOption,
    Dtype,
    DtypeOption,
    LengthOption,
    ModelOption,
    PoolingMode,
    app,
    check_devices,
    clear_errors,
    console,
    load,
    marked,
    placement,
    progress_bar,
)

# The curve is over every layer and the dependency over every token, also of a prompt whose authors read less.
_EVERYTHING: dict[str, object] = {"rows": "all", "output_layer": -1, "final_norm": True}


@app.command("layers")
def layers_command(
    model: ModelOption = str(DEMO_MODEL),
    data: Annotated[
        Path | None, typer.Option(help="Lines of two texts and a score, separated by tabs. Default: demo texts.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory to write; it must not exist yet, or be empty.")] = Path(
        "st-reba-layers"
    ),
    pooling: Annotated[PoolingMode, typer.Option(help="How token vectors become one.")] = PoolingMode.mean,
    template: Annotated[
        str | None, typer.Option(help='Text with {text} slots, or a name such as "springer" or "prompteol".')
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Texts at a time.", min=1)] = 32,
    max_seq_length: LengthOption = None,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
) -> None:
    """After which layer a model embeds best, and how much its tokens share: tables and plots.

    Without --model and --data it runs offline, on the small language model and the labelled texts in the package.
    """
    with clear_errors():
        require_matplotlib()
        check_devices(device)
        check_file(data, "--data")
        pairs = read_pairs(DEMO_PAIRS if data is None else data)
        device, dtype = placement(device, dtype)
        template = "{text}" if template is None else template
        repeats = Template.parse(template).copies > 1
        mode = "lasttoken" if pooling is PoolingMode.last else pooling.value
        with whole_directory(out) as scratch:
            reader = EchoModule if repeats else CausalTransformer
            module = load(reader, model, max_seq_length, dtype, template=template, **_EVERYTHING)
            read = SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension(), mode)], device=device)
            with progress_bar() as progress:
                texts = pairs.texts()
                task = progress.add_task("Reading every layer", total=2 * len(texts))
                similarity = EmbeddingSimilarityEvaluator(
                    pairs.first, pairs.second, pairs.scores, batch_size=batch_size, main_similarity="cosine"
                )
                turning_point = TurningPointEvaluator(similarity, on_step=lambda count: progress.advance(task, count))
                with warnings.catch_warnings():
                    # A layer after which all texts are alike, such as that of a prompt's last input embedding: a dash.
                    warnings.simplefilter("ignore", ConstantInputWarning)
                    turning_point(read)
                dependency = DependencyEvaluator(
                    texts, layers="all", batch_size=batch_size, on_step=lambda count: progress.advance(task, count)
                )
                dependency(read)
            turning_point.write_csv(scratch / "layers.csv")
            turning_point.draw(scratch / "layers.png")
            dependency.write_csv(scratch / "dependency.csv")
            dependency.draw(scratch / "dependency.png")
    shown = "the demo LM" if model == str(DEMO_MODEL) else model
    title = f"{shown}, {pooling.value} pooling, {len(pairs)} pairs of {'demo texts' if data is None else data}"
    # Not the table's own title, which would be broken where the table ends.
    console.print(Text(title, style="italic"), soft_wrap=True)
    console.print(_layers_table(turning_point, dependency))
    console.print(
        f"Turning point: layer {turning_point.turning_point} of {len(turning_point.scores) - 1}. "
        "Spearman: cosine similarity against the labels, x 100. Dependency: mean Spearman correlation of a text's last "
        "token with its others."
    )
    console.print(f"Wrote layers.csv, layers.png, dependency.csv and dependency.png to {out}", soft_wrap=True)


def _layers_table(turning_point: TurningPointEvaluator, dependency: DependencyEvaluator) -> Table:
    table = Table()
    table.add_column("Layer", justify="right")
    table.add_column("Spearman", justify="right")
    table.add_column("Dependency", justify="right")
    table.add_column("")
    means = dependency.correlations.mean(axis=1)
    for layer, (score, mean) in enumerate(zip(turning_point.scores, means, strict=True)):
        best = layer == turning_point.turning_point
        spearman = "-" if math.isnan(score) else f"{100 * score:.1f}"
        table.add_row(str(layer), marked(spearman, best), f"{mean:.2f}", marked("turning point" if best else "", best))
    return table
