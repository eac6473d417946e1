"""What ``st-reba layers`` does."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

from rich.table import Table
from rich.text import Text
from scipy.stats import ConstantInputWarning
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from st_reba.data.tables import Labelled
from st_reba.evaluation import DependencyEvaluator, TurningPointEvaluator
from st_reba.evaluation.tasks import task_of
from st_reba.files import atomic_directory
from st_reba.modules import CausalTransformer, EchoModule
from st_reba.optional import require
from st_reba.text.templates import Template

from ..common import Dtype, PoolingMode, marked
from ..data import Given
from ..printing import Shown, console
from .given import described, read
from .models import check_devices, load_fastest
from .showing import shown_model

# The curve is over every layer and the dependency over every token, also of a prompt whose authors read less.
_EVERYTHING: dict[str, object] = {"rows": "all", "output_layer": -1, "final_norm": True}


def run(
    *,
    model: str,
    given: Given,
    out: Path,
    pooling: PoolingMode,
    template: str | None,
    batch_size: int,
    max_seq_length: int | None,
    dtype: Dtype,
    device: str | None,
) -> None:
    """Read every layer, write tables and plots, and show the table."""
    require("matplotlib.figure", "report", "Drawing")
    check_devices(device)
    labelled = read(given)
    if not isinstance(labelled, Labelled):
        raise ValueError("Layers are scored by labels: give --data with scored pairs, triplets, or a retrieval task.")
    scored = task_of(labelled, batch_size)
    template = "{text}" if template is None else template
    repeats = Template.parse(template).copies > 1
    mode = "lasttoken" if pooling is PoolingMode.last else pooling.value
    with atomic_directory(out) as scratch:
        reader = EchoModule if repeats else CausalTransformer
        texts = labelled.texts()
        module = load_fastest(reader, model, max_seq_length, dtype, device, texts, template=template, **_EVERYTHING)
        parts = [module, Pooling(module.get_embedding_dimension(), mode)]
        model_read = SentenceTransformer(modules=parts, device=str(module.model.device), prompts=dict(scored.prompts))
        with Shown() as progress:
            task = progress.add_task("Reading every layer", total=2 * len(texts), unit="texts")
            turning_point = TurningPointEvaluator(scored, on_step=lambda count: progress.advance(task, count))
            with warnings.catch_warnings():
                # A layer after which all texts are alike, such as that of a prompt's last input embedding: a dash.
                warnings.simplefilter("ignore", ConstantInputWarning)
                turning_point(model_read)
            dependency = DependencyEvaluator(
                texts, layers="all", batch_size=batch_size, on_step=lambda count: progress.advance(task, count)
            )
            dependency(model_read)
        turning_point.write_csv(scratch / "layers.csv")
        turning_point.draw(scratch / "layers.png", percent=True)
        dependency.write_csv(scratch / "dependency.csv")
        dependency.draw(scratch / "dependency.png")
    metric = scored.column.metric.removesuffix(" x 100")
    title = f"{shown_model(model)}, {pooling.value} pooling, {described(given, labelled)}"
    # Not the table's own title, which would be broken where the table ends.
    console.print(Text(title, style="italic"), soft_wrap=True)
    console.print(_layers_table(turning_point, dependency, metric))
    console.print(
        f"Turning point: layer {turning_point.turning_point} of {len(turning_point.scores) - 1}. "
        f"{metric}, x 100 (in layers.csv it is not multiplied): {scored.column.note} Dependency: mean Spearman "
        "correlation of a text's last token with its others.",
        soft_wrap=True,
    )
    console.print(f"Wrote layers.csv, layers.png, dependency.csv and dependency.png to {out}", soft_wrap=True)


def _layers_table(turning_point: TurningPointEvaluator, dependency: DependencyEvaluator, metric: str) -> Table:
    table = Table()
    table.add_column("Layer", justify="right")
    table.add_column(metric[:1].upper() + metric[1:], justify="right")
    table.add_column("Dependency", justify="right")
    table.add_column("")
    means = dependency.correlations.mean(axis=1)
    for layer, (score, mean) in enumerate(zip(turning_point.scores, means, strict=True)):
        best = layer == turning_point.turning_point
        shown = "-" if math.isnan(score) else f"{100 * score:.1f}"
        table.add_row(str(layer), marked(shown, best), f"{mean:.2f}", marked("turning point" if best else "", best))
    return table
