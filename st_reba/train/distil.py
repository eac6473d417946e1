"""Distilling a recipe that needs no training into a model that costs less: from plain texts, without labels."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from rich.progress import Progress
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MSELoss
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, StaticEmbedding
from sentence_transformers.util import get_device_name, pairwise_cos_sim
from sklearn.linear_model import Ridge
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import set_seed

from ..evaluation import AgreementEvaluator, bootstrap
from ..evaluation.embedded import Embedded, TensorCache
from ..export import static_model
from ..files import atomic_file
from ..modules import CausalModule, CausalTransformer
from ..modules.moments import principal_directions
from ..recipes import Recipe, find
from ..recipes.recipe import POOLINGS
from .bellm import add_lora, merge_adapter
from .fitting import begin, fit_as_set, publish, save, weights_digest
from .rows import dataset, read_scored_pairs, read_sentences
from .settings import RunSettings, setting

#: Where in an output directory the teacher's vectors and the report lie.
TEACHER, REPORT = "teacher", "distil.json"

#: The student that is a table of token vectors.
STATIC = "static"

#: Arguments by the student's kind. At LoRA's rate the rows of a table hardly move, and an encoder is damaged.
_OF_A_TABLE: Mapping[str, Any] = {"num_train_epochs": 10, "learning_rate": 1e-2}
_OF_A_MODEL: Mapping[str, Any] = {"learning_rate": 5e-5}

#: Texts that what stands around a teacher's pooling is fitted on at most, and those that a student's start is.
_WHITENED, _STARTED = 1000, 4096
#: Texts that are held out, at least: of fewer than three, there are no two cosines to compare.
_FEWEST_HELD_OUT = 3
#: Texts of a batch where nothing is trained.
_READ = 32
#: Texts that are kept as one file.
_CHUNK = 1024
#: Of which ridge regression takes the best.
_SHRINKAGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)


@dataclass(frozen=True, kw_only=True)
class DistilTraining(RunSettings):
    """What :func:`train_distil` is asked for.

    Attributes:
        model: A decoder-only model's path or Hub id, that the teacher reads.
        recipe: The teacher, by the key or name of any recipe: see :func:`st_reba.recipes.find`.
        texts: Plain texts: see :func:`st_reba.train.read_sentences`. Some thousands.
        template: Of the teacher, where its recipe takes one; None: the recipe's own.
        student: The key of a recipe, which is read in one plain pass of the same model, with LoRA; ``"static"``, a
            table of token vectors; or the path or Hub id of a SentenceTransformer, which is trained whole. A directory
            that is called as a recipe is given as ``"./NAME"``.
        pooling: Of a student that is a recipe; None: the recipe's usual one.
        dimensions: Numbers of the student's embedding; None: as many as it has by itself, or as the teacher has if
            those are fewer.
        held_out: How many of the texts nothing is trained on: what the student reaches is told of these.
        evaluation: Scored pairs, on which student and teacher are scored in the end: see
            :func:`st_reba.train.read_scored_pairs`.
        rank: Of LoRA, and so are ``alpha``, ``dropout`` and ``target_modules``: see
            :class:`st_reba.train.BeLLMTraining`.
        max_seq_length: Tokens of a text; None: what a model has room for.
        arguments: As :class:`RunSettings`; 3 epochs, of a table 10, in batches of 32. The rate is reached after a tenth
            of the steps: 2e-4 for a recipe, 1e-2 for a table, 5e-5 for a SentenceTransformer.
        model_kwargs: As :class:`RunSettings`, for the language model. What is trained is float32.
    """

    # Those of a student that is a recipe: see usual_arguments.
    ARGUMENTS: ClassVar[Mapping[str, Any]] = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 32,
        "learning_rate": 2e-4,
        "warmup_steps": 0.1,
    }
    SMALLEST_BATCH: ClassVar[int] = 2

    model: str
    recipe: str
    texts: str = setting(may_change=True)
    template: str | None = None
    student: str = "classical"
    pooling: Literal["mean", "last"] | None = None
    dimensions: int | None = setting(None, least=1)
    held_out: int = setting(500, least=_FEWEST_HELD_OUT)
    rank: int = setting(16, least=1)
    alpha: float = setting(32, above=0)
    dropout: float = setting(0.0, least=0, below=1)
    target_modules: tuple[str, ...] | Literal["all-linear"] | None = "all-linear"
    max_seq_length: int | None = setting(None, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        find(self.recipe)
        student = self.student_recipe
        if self.pooling is not None and student is None:
            raise ValueError(f"pooling: the student {self.student!r} is no recipe, and pools as it does. Leave it out.")
        if "quantization_config" in self.model_kwargs:
            raise ValueError(
                "model_kwargs: quantization_config: a student is merged into whole weights. Leave it out; "
                "dtype: bfloat16 takes half of the memory."
            )

    @property
    def usual_arguments(self) -> Mapping[str, Any]:
        if self.student == STATIC:
            return {**self.ARGUMENTS, **_OF_A_TABLE}
        return {**self.ARGUMENTS, **_OF_A_MODEL} if self.is_own_model else self.ARGUMENTS

    @property
    def evaluates(self) -> bool:
        """There are always texts that were held out."""
        return True

    @property
    def is_own_model(self) -> bool:
        """Whether the student is a SentenceTransformer that is there already."""
        return self.student != STATIC and self.student_recipe is None

    @property
    def student_recipe(self) -> Recipe | None:
        """The recipe that the student is, if it is one.

        A recipe's key is the recipe, whatever lies in the working directory.

        Raises:
            ValueError: If something is fitted behind its pooling, which a student learns by itself; or it is neither a
                recipe nor a path or Hub id.
        """
        if self.student == STATIC or "/" in self.student:
            return None
        try:
            found = find(self.student)
        except ValueError as error:
            if Path(self.student).exists():
                return None
            raise ValueError(
                f"student: {error} A directory is given by its path, a model of the Hub as org/name."
            ) from None
        if found.part is not None:
            raise ValueError(
                f"student: {self.student!r} has something fitted around its pooling, which a student learns by itself. "
                "Give a recipe without, such as classical or prompteol."
            )
        return found if self.pooling is None else replace(found, pooling=self.pooling)


def train_distil(settings: DistilTraining, output: str | Path, *, progress: bool = True) -> SentenceTransformer:
    r"""Distil a recipe into a student, and save it as ``output/model``.

    .. math:: \mathcal{L} = \frac{1}{B k} \sum_b \lVert s(x_b) - \hat t(x_b) \rVert^2, \qquad
        \hat t(x) = \frac{P\,t(x)}{\lVert P\,t(x) \rVert}

    with the teacher's embedding t, frozen, the k directions P in which its embeddings are longest, and the student's
    embedding s of length 1. Behind the student's pooling stands a linear map, which begins as the one that ridge
    regression finds: what is trained has that distance less to go.

    Args:
        settings: What is asked for.
        output: The run's directory: ``teacher``, the teacher's vectors, which are made once; ``checkpoints`` while it
            lasts; ``model``, and ``distil.json``, what the student reaches. Where a run was interrupted, it goes on.
        progress: Whether to show bars.

    Returns:
        The student.

    Raises:
        ValueError: If the texts are too few, or a recipe cannot be run with this model; or as
            :func:`st_reba.train.fit`.
        DivergedError: As there.
        ImportError: If peft, datasets or accelerate is not installed.
    """
    output = Path(output)
    begin(settings, output)
    texts, held_out = split(settings)
    pairs = None if settings.evaluation is None else read_scored_pairs(settings.evaluation)[:]
    parts = [texts, held_out, *([] if pairs is None else [pairs["sentence1"], pairs["sentence2"]])]
    vectors, read = teacher_vectors(settings, texts, list(chain(*parts)), output / TEACHER, progress)
    of_texts, of_held_out, *of_pairs = vectors.split(list(map(len, parts)))
    set_seed(settings.random_seed)
    body = _body(settings, texts)
    # A table is made of the language model, which is known.
    begun_with = "" if settings.student == STATIC else weights_digest(body)
    student, wanted = _student(settings, body, texts, of_texts)
    evaluator = AgreementEvaluator(held_out, of_held_out, name="held-out", batch_size=_READ)
    start = evaluator(student)
    if settings.student_recipe is not None:
        add_lora(student, settings)
    dense = student[-2]
    hook = dense.register_forward_pre_hook(_in_the_weights_precision) if isinstance(dense, Dense) else None
    rows, loss = dataset({"sentence": texts, "label": list(wanted.numpy())}), MSELoss(student)
    identity = {"frozen_weights": f"{read} {begun_with}".strip()}
    fit_as_set(settings, student, rows, loss, output, evaluator=evaluator, progress=progress, identity=identity)
    student.eval()
    if settings.student_recipe is not None:
        merge_adapter(student)
    if hook is not None:
        hook.remove()
        dense.to(next(student.parameters()).dtype)
    reached: dict[str, Any] = {
        "teacher": settings.recipe,
        "student": settings.student,
        "texts": len(texts),
        "held_out": len(held_out),
        "at_the_start": start,
        "trained": evaluator(student),
    }
    if pairs is not None:
        embedded = [
            student.encode(side, batch_size=_READ, convert_to_tensor=True, show_progress_bar=False)
            for side in parts[2:]
        ]
        cosines = {"teacher": pairwise_cos_sim(*of_pairs), "student": pairwise_cos_sim(*embedded).float().cpu()}
        reached["pairs"] = shares({name: own.numpy() for name, own in cosines.items()}, pairs["score"])
    with atomic_file(output / REPORT) as stream:
        stream.write((json.dumps(reached, indent=2) + "\n").encode())
    save(student, output)
    publish(settings, output)
    return student


def split(settings: DistilTraining) -> tuple[list[str], list[str]]:
    """The texts to train on, and those that are held out: the same ones whatever the seed."""
    different = list(dict.fromkeys(read_sentences(settings.texts)["sentence"]))
    least = settings.held_out + settings.batch_rows
    if len(different) < least:
        raise ValueError(
            f"{settings.texts} has {len(different)} different texts, of which {settings.held_out} are held out and "
            f"{settings.batch_rows} are a batch: give at least {least}, or lower held_out (--held-out) or "
            "per_device_train_batch_size (--batch-size)."
        )
    held_out = set(random.Random(0).sample(range(len(different)), settings.held_out))
    return (
        [text for index, text in enumerate(different) if index not in held_out],
        [text for index, text in enumerate(different) if index in held_out],
    )


def _loaded(settings: DistilTraining, kind: Callable[..., CausalModule], **arguments: Any) -> CausalModule:
    module = settings.load(kind, settings.model, max_seq_length=settings.max_seq_length, **arguments)
    return module.to(get_device_name())


def teacher_vectors(
    settings: DistilTraining, texts: list[str], every: list[str], directory: Path, progress: bool
) -> tuple[Tensor, str]:
    """The teacher's embeddings of every text, and a digest of the language model's weights."""
    recipe = replace(find(settings.recipe), fit_texts=tuple(_some(texts, _WHITENED)))
    if settings.template is not None:
        own = {**recipe.row.settings, "template": settings.template}
        recipe = replace(recipe, row=replace(recipe.row, settings=own))
    backbone = _loaded(settings, CausalTransformer)
    read = weights_digest(backbone)
    fitted_on = recipe.fit_texts if recipe.fitted else ()
    key = (read, str(backbone.model.dtype), recipe.result, settings.template, backbone.max_seq_length, fitted_on)
    kept, teacher = TensorCache(directory), cache(lambda: recipe.model(backbone).eval())

    def embed(chunk: Sequence[str], prompt: str | None) -> dict[str, Tensor]:
        def vectors() -> dict[str, Tensor]:
            made = teacher().encode(list(chunk), batch_size=_READ, convert_to_tensor=True, show_progress_bar=False)
            return {"vectors": made.float()}

        found = kept.get([*key, chunk], vectors)
        bar.advance(task, len(chunk))
        return found

    embedded = Embedded(embed, _CHUNK)
    with Progress(disable=not progress, transient=True) as bar:
        task = bar.add_task("Embedding with the teacher", total=len({*texts, *every}))
        # Those that are trained on lie in the same files, whatever else is asked for.
        embedded.add(texts)
        embedded.add(every)
    return embedded.of("vectors", every), read


def _student(
    settings: DistilTraining, body: SentenceTransformer, texts: list[str], vectors: Tensor
) -> tuple[SentenceTransformer, Tensor]:
    """The student with the linear map that it begins with, and what it shall give for each text, (n, k)."""
    some = _some(range(len(texts)), _STARTED)
    read = [texts[index] for index in some]
    inputs = body.encode(read, batch_size=_READ, convert_to_tensor=True, show_progress_bar=False).float().cpu()
    count = min(settings.dimensions or inputs.shape[1], vectors.shape[1])
    wanted = targets(vectors, count)
    linear = linear_map(inputs, wanted[some])
    if settings.student == STATIC:
        # A linear map of a mean of rows is put into the rows.
        table = cast(StaticEmbedding, body[0])
        rows = table.embedding.weight.detach()
        mapped = linear.to(rows.device)(rows).detach()
        table.embedding = nn.EmbeddingBag.from_pretrained(mapped, freeze=False)
        table.embedding_dim = mapped.shape[1]
        return SentenceTransformer(modules=[table, Normalize()], device=str(body.device)), wanted
    dense = Dense(linear.in_features, linear.out_features, activation_function=nn.Identity())
    dense.linear.load_state_dict(linear.state_dict())
    return SentenceTransformer(modules=[*body, dense, Normalize()], device=str(body.device)), wanted


def _body(settings: DistilTraining, texts: list[str]) -> SentenceTransformer:
    """The student without what makes its vectors the teacher's."""
    recipe = settings.student_recipe
    if recipe is not None:
        module = _loaded(settings, recipe.row.module, **recipe.row.arguments(recipe.pooling, recipe.layer))
        modules = [module, Pooling(module.get_embedding_dimension(), POOLINGS[recipe.pooling])]
    elif settings.student == STATIC:
        read = _loaded(settings, CausalTransformer)
        modules = [static_model(read, _some(texts, _STARTED), dimension=settings.dimensions)[0]]
    else:
        model = SentenceTransformer(settings.student)
        if settings.max_seq_length is not None:
            model.max_seq_length = settings.max_seq_length
        modules = list(model.children())
        while isinstance(modules[-1], Normalize):
            modules.pop()
    return SentenceTransformer(modules=modules, device=get_device_name())


def shares(cosines: Mapping[str, Any], labels: list[float]) -> dict[str, Any]:
    """Spearman's correlations of ``teacher`` and ``student`` with labels, and how much of the one the other reaches.

    Args:
        cosines: (n,) of each.
        labels: n.

    Returns:
        ``teacher``, ``student`` and ``share``, each a value with its 95% interval over the pairs.
    """
    items = bootstrap.spearman(dict(cosines), labels)
    # Of each the correlation on all pairs, then those on the pairs that were drawn.
    found = dict(zip(items.recipes, np.column_stack([items.scores, items.replicates]), strict=True))
    found["share"] = found["student"] / found["teacher"]
    return {name: [float(own[0]), *map(float, bootstrap.interval(own[1:]))] for name, own in found.items()}


def _some(items: Any, most: int) -> list[Any]:
    """All of them in some order, or as many as something is fitted on."""
    return random.Random(0).sample(list(items), min(most, len(items)))


def _in_the_weights_precision(dense: Dense, inputs: tuple[dict[str, Any]]) -> tuple[dict[str, Any]]:
    """A linear map that is trained is float32, whatever the language model in front of it is."""
    [features] = inputs
    vectors = features["sentence_embedding"]
    return ({**features, "sentence_embedding": vectors.to(dense.linear.weight.dtype)},)


# What a frozen teacher says of texts: embedded once, and turned into what a student can reach


def targets(vectors: Tensor, dimension: int) -> Tensor:
    """(n, dimension), of length 1: vectors (n, D) along the directions in which they are longest, so that of their dot
    products most is left; a zero vector stays one."""
    wide = vectors.double()
    _, directions = principal_directions(wide.mT @ wide)
    return normalize(vectors @ directions[:dimension].float().mT, dim=-1)


def linear_map(inputs: Tensor, outputs: Tensor) -> nn.Linear:
    r"""The linear map from one embedding to another that ridge regression finds.

    .. math:: W = \arg\min_W \frac{1}{n} \sum_i \Bigl\lVert W \frac{x_i - \mu}{\sigma} - (y_i - \bar y) \Bigr\rVert^2
        + \lambda \lVert W \rVert^2

    with each dimension's mean and deviation; :math:`\lambda` is the best of some on a tenth of the texts.

    Args:
        inputs: (n, d).
        outputs: (n, k).
    """
    x, y = inputs.double().numpy(), outputs.double().numpy()
    mean, scale = x.mean(axis=0), x.std(axis=0)
    # What hardly varies says nothing, and dropout would move it far. Where texts are fewer than dimensions, those in
    # which a whitened table does not vary hold the rounding of float32, some 1e-6 of the others.
    constant = scale <= np.maximum(1e-6 * np.abs(mean), 1e-5 * np.sqrt(np.square(scale).mean()))
    inverse = np.where(constant, 0.0, 1 / np.where(constant, 1, scale))
    z = (x - mean) * inverse
    seen = len(z) - max(1, len(z) // 10)

    def error(shrinkage: float) -> float:
        found = Ridge(shrinkage * seen).fit(z[:seen], y[:seen]).predict(z[seen:])
        return float(np.square(found - y[seen:]).sum())

    found = Ridge(min(_SHRINKAGES, key=error) * len(z)).fit(z, y)
    weight = found.coef_ * inverse
    linear = nn.Linear(x.shape[1], y.shape[1])
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(weight))
        linear.bias.copy_(torch.from_numpy(found.intercept_ - weight @ mean))
    return linear
