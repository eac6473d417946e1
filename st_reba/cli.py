"""The ``st-reba`` command."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from sentence_transformers.util import get_device_name
from transformers.utils import logging as transformers_logging

from . import __version__
from .compare import Result, compare, default_recipes, number_of_steps
from .data import DEMO_MODEL, DEMO_PAIRS, DEMO_QUESTIONS, read_pairs
from .evaluation import DependencyEvaluator, OddOneOutEvaluator, TurningPointEvaluator
from .evaluation.figures import require_matplotlib
from .layout import Template
from .modules import CausalModule, CausalTransformer, EchoModule, ReBAModule

app = typer.Typer(
    name="st-reba",
    help="Text embeddings from decoder-only language models, without training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
console = Console()


class Method(str, Enum):
    classical = "classical"
    echo = "echo"
    reba = "reba"


class PoolingMode(str, Enum):
    mean = "mean"
    last = "last"
    lasttoken = "lasttoken"
    weightedmean = "weightedmean"
    max = "max"
    cls = "cls"


class Dtype(str, Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


ModelOption = Annotated[str, typer.Option("--model", help="A decoder-only model: a directory or a Hub id.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Weights' precision; auto: float32 on a CPU, else the model's own.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, mps ...; the fastest there is by default.")]
LengthOption = Annotated[int | None, typer.Option(help="Tokens of one copy of a text, at most.", min=1)]


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        console.print(__version__)
        raise typer.Exit


@app.command("compare")
def compare_command(
    model: ModelOption = str(DEMO_MODEL),
    data: Annotated[
        Path | None, typer.Option(help="Lines of two texts and a score, separated by tabs. Default: demo texts.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Texts at a time.", min=1)] = 32,
    max_seq_length: LengthOption = None,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
) -> None:
    """Which recipe suits a model and texts: all of them beside two controls.

    Without --model and --data it runs offline, on the small language model and the labelled texts in the package.
    """
    with _clear_errors():
        pairs = read_pairs(DEMO_PAIRS if data is None else data)
        questions = OddOneOutEvaluator.from_csv(DEMO_QUESTIONS).questions if data is None else []
        device, dtype = _placement(device, dtype)
        backbone = _load(CausalTransformer, model, max_seq_length, dtype).to(device)
        recipes = default_recipes()
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("Comparing", total=number_of_steps(recipes, questions))
            skipped: list[str] = []
            results = compare(
                backbone,
                pairs,
                questions,
                recipes=recipes,
                batch_size=batch_size,
                on_step=lambda step: progress.update(task, advance=1, description=step),
                on_skip=lambda recipe, reason: skipped.append(f"{recipe.name} ({recipe.pooling}): {reason}"),
            )
    shown = "the demo LM" if model == str(DEMO_MODEL) else model
    texts = "demo texts" if data is None else str(data)
    console.print(_table(results, f"{shown} on {len(pairs)} pairs of {texts}"))
    console.print(_reading(results))
    for line in skipped:
        console.print(f"Left out {line}", highlight=False)


@app.command("build")
def build_command(
    model: ModelOption,
    out: Annotated[Path, typer.Option(help="Directory to write; it must not exist yet, or be empty.")],
    method: Annotated[Method, typer.Option(help="How the language model is read.")] = Method.reba,
    pooling: Annotated[PoolingMode, typer.Option(help="How token vectors become one.")] = PoolingMode.mean,
    repetitions: Annotated[int | None, typer.Option(help="Copies of the text (echo, reba). Default: 2.")] = None,
    layers: Annotated[str, typer.Option(help='Layers that count (reba): "all", or indices such as "-1,-2".')] = "all",
    template: Annotated[
        str | None, typer.Option(help='Text with {text} slots (classical, echo), or "springer".')
    ] = None,
    normalize: Annotated[bool, typer.Option(help="Scale vectors to length 1.")] = True,
    max_seq_length: LengthOption = None,
    dtype: Annotated[Dtype, typer.Option(help="Precision of the saved weights; auto: the model's own.")] = Dtype.auto,
) -> None:
    """Write a ready SentenceTransformer directory."""
    with _clear_errors():
        mode = "lasttoken" if pooling is PoolingMode.last else pooling.value
        settings = _settings(method, mode, repetitions, layers, template)
        with _whole_directory(out) as scratch:
            module = _load(_MODULES[method], model, max_seq_length, dtype, **settings)
            parts = [module, Pooling(module.get_embedding_dimension(), mode)]
            built = SentenceTransformer(modules=[*parts, Normalize()] if normalize else parts, device="cpu")
            built.save_pretrained(str(scratch))
    console.print(f'Wrote {out}. Load it with: import st_reba; SentenceTransformer("{out}")', highlight=False)


_MODULES: dict[Method, type[CausalModule]] = {
    Method.classical: CausalTransformer,
    Method.echo: EchoModule,
    Method.reba: ReBAModule,
}


def _settings(
    method: Method, pooling: str, repetitions: int | None, layers: str, template: str | None
) -> dict[str, object]:
    """The module's arguments; refuses options that the method does not have."""
    settings: dict[str, object] = {}
    if method is Method.reba:
        settings["rows"] = "last" if pooling == "lasttoken" else "all"
        settings["layers"] = _layers(layers)
    elif layers != "all":
        raise ValueError(f"--layers is for --method reba; {method.value} does not look at attention.")
    if repetitions is not None:
        if method is Method.classical:
            raise ValueError("--repetitions is for --method echo or reba; the classical embedding reads one copy.")
        settings["repetitions"] = repetitions
    if template is not None:
        if method is Method.reba:
            raise ValueError("--template is for --method classical or echo; ReBA repeats the bare text.")
        settings["template"] = template
    return settings


def _layers(layers: str) -> str | list[int]:
    if layers == "all":
        return layers
    try:
        return [int(layer) for layer in layers.split(",")]
    except ValueError:
        raise ValueError(f'--layers {layers!r}: use "all" or indices separated by commas, such as "-1,-2".') from None


def _placement(device: str | None, dtype: Dtype) -> tuple[str, Dtype]:
    """Where to run and in which precision, when that is left to us."""
    device = device or get_device_name()
    return device, Dtype.float32 if dtype is Dtype.auto and device == "cpu" else dtype


def _load(
    module_class: type[CausalModule],
    model: str,
    max_seq_length: int | None,
    dtype: Dtype,
    **settings: object,
) -> CausalModule:
    transformers_logging.disable_progress_bar()
    module = module_class(model, model_kwargs={"dtype": dtype.value}, **settings)  # type: ignore[arg-type]
    if max_seq_length is not None:
        module.max_seq_length = max_seq_length
    return module


@contextmanager
def _clear_errors() -> Iterator[None]:
    """What a user can mend is said in a sentence; anything else keeps its trace."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        Console(stderr=True).print(f"[red]Error:[/red] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _table(results: list[Result], title: str) -> Table:
    with_words = any(result.odd_one_out is not None for result in results)
    table = Table(title=title, title_justify="left")
    table.add_column("Recipe", no_wrap=True)
    table.add_column("Pooling")
    table.add_column("Spearman", justify="right")
    if with_words:
        table.add_column("Odd one\nout", justify="right")
    table.add_column("Texts/s", justify="right")
    table.add_column("Cost", justify="right")
    own = [result for result in results if not result.recipe.control]
    best = max(result.spearman for result in own)
    best_words = max((result.odd_one_out or 0 for result in own), default=0)
    for index, result in enumerate(results):
        recipe = result.recipe
        cells = [recipe.name, recipe.pooling, _marked(f"{100 * result.spearman:.1f}", result.spearman == best)]
        if with_words:
            accuracy = result.odd_one_out
            shown = "" if accuracy is None else f"{100 * accuracy:.1f}"
            cells.append(_marked(shown, not recipe.control and accuracy == best_words))
        cells += [f"{result.sentences_per_second:.0f}", f"{result.cost:.2f}x"]
        following = results[index + 1].recipe if index + 1 < len(results) else recipe
        ends = (recipe.control, recipe.pooling) != (following.control, following.pooling)
        table.add_row(*cells, style="dim" if recipe.control else None, end_section=ends and not following.control)
    return table


def _marked(text: str, best: bool) -> str:
    return f"[bold green]{text}[/]" if best else text


def _reading(results: list[Result]) -> str:
    """What the table says, and what it does not."""
    best = max((result for result in results if not result.recipe.control), key=lambda result: result.spearman)
    control = max((result for result in results if result.recipe.control), key=lambda result: result.spearman)
    verdict = (
        f"Best: {best.recipe.name} with {best.recipe.pooling} pooling. "
        if best.spearman > control.spearman
        else f"No recipe beats the control '{control.recipe.name}' ({control.recipe.pooling}) on these texts. "
    )
    words = "Odd one out: word sense, four choices (chance 25), the same under every pooling. "
    return (
        f"{verdict}Spearman: cosine similarity against the labels, x 100. "
        f"{words if best.odd_one_out is not None else ''}"
        "Cost: time beside Classical under the same pooling. Dim rows are controls."
    )


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
    template: Annotated[str | None, typer.Option(help='Text with {text} slots, or "springer".')] = None,
    batch_size: Annotated[int, typer.Option(help="Texts at a time.", min=1)] = 32,
    max_seq_length: LengthOption = None,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = None,
) -> None:
    """After which layer a model embeds best, and how much its tokens share: tables and plots.

    Without --model and --data it runs offline, on the small language model and the labelled texts in the package.
    """
    with _clear_errors():
        require_matplotlib()
        pairs = read_pairs(DEMO_PAIRS if data is None else data)
        device, dtype = _placement(device, dtype)
        template = "{text}" if template is None else template
        repeats = Template.parse(template).copies > 1
        mode = "lasttoken" if pooling is PoolingMode.last else pooling.value
        with _whole_directory(out) as scratch:
            module = _load(
                EchoModule if repeats else CausalTransformer, model, max_seq_length, dtype, template=template
            )
            read = SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension(), mode)], device=device)
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with Progress(*columns, console=console, transient=True) as progress:
                texts = pairs.texts()
                task = progress.add_task("Reading every layer", total=2 * len(texts))
                similarity = EmbeddingSimilarityEvaluator(
                    pairs.first, pairs.second, pairs.scores, batch_size=batch_size, main_similarity="cosine"
                )
                turning_point = TurningPointEvaluator(similarity, on_step=lambda count: progress.advance(task, count))
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
    console.print(_layers_table(turning_point, dependency, title))
    console.print(
        f"Turning point: layer {turning_point.turning_point} of {len(turning_point.scores) - 1}. "
        "Spearman: cosine similarity against the labels, x 100. Dependency: mean Spearman correlation of a text's last "
        "token with its others."
    )
    console.print(
        f"Wrote layers.csv, layers.png, dependency.csv and dependency.png to {out}", highlight=False, soft_wrap=True
    )


@contextmanager
def _whole_directory(out: Path) -> Iterator[Path]:
    """A directory to write in, which takes its place ``out`` when all is written, or vanishes.

    Raises:
        ValueError: If something lies there already.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty directory: choose another --out, or remove it.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        yield whole
        if out.exists():
            out.rmdir()
        shutil.move(whole, out)


def _layers_table(turning_point: TurningPointEvaluator, dependency: DependencyEvaluator, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("Layer", justify="right")
    table.add_column("Spearman", justify="right")
    table.add_column("Dependency", justify="right")
    table.add_column("")
    means = dependency.correlations.mean(axis=1)
    for layer, (score, mean) in enumerate(zip(turning_point.scores, means, strict=True)):
        best = layer == turning_point.turning_point
        spearman = "-" if math.isnan(score) else f"{100 * score:.1f}"
        table.add_row(
            str(layer), _marked(spearman, best), f"{mean:.2f}", _marked("turning point" if best else "", best)
        )
    return table
