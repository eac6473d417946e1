"""JTCSE: training of two encoders on texts without labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import set_seed

from ..modules import TwinTower
from .fitting import begin, fit, pairs_evaluator, read_sentences, save
from .losses import JTCSELoss
from .settings import CONTRASTIVE, STRICT, NotNegative, PathText, Positive, RunSettings


@dataclass(frozen=True, kw_only=True, config=STRICT)
class JTCSETraining(RunSettings):
    """Settings of :func:`train_jtcse`.

    Values that the paper does not give are those of the authors' published script, for towers already trained with
    SimCSE. Other towers need a higher learning rate: 3e-5 is SimCSE's.

    Attributes:
        model: Tower I, the path or Hub id of an encoder.
        texts: Source of the texts, as for :func:`st_reba.train.read_sentences`.
        second_model: Tower II; None: a copy of tower I.
        evaluation: Scored pairs to evaluate on while training: see :func:`st_reba.train.read_scored_pairs`.
        cross_every: As for :class:`st_reba.TwinTower`; 0 trains TNCSE.
        max_seq_length: Maximum number of tokens per text.
        temperature: As for :class:`st_reba.train.losses.JTCSELoss`, like the weights and ``least_cosine``.
        arguments: As :class:`RunSettings`; the defaults are batches of 64 without duplicates, a rate of 1.3e-6 and a
            weight decay of 0.01.
        model_kwargs: As :class:`RunSettings`, for both towers.
    """

    ARGUMENTS = {**CONTRASTIVE, "learning_rate": 1.3e-6, "weight_decay": 0.01}
    SMALLEST_BATCH: ClassVar[int] = 2

    model: PathText
    texts: PathText
    second_model: PathText | None = None
    cross_every: Annotated[int, Field(ge=0)] = 2
    max_seq_length: Annotated[int, Field(ge=3)] = 64
    temperature: Positive = 0.05
    info_nce_weight: NotNegative = 1.0
    interaction_weight: NotNegative = 1.0
    modulus_weight: NotNegative = 1.0
    least_cosine: Annotated[float, Field(gt=0, lt=1)] = 1e-4


def train_jtcse(settings: JTCSETraining, output: str | Path, *, progress: bool = True) -> SentenceTransformer:
    """Train two towers on texts, and save the model as ``output/model``.

    Args:
        settings: Settings of the training.
        output: Directory of the run; see :func:`st_reba.train.fit`.
        progress: Whether to show a progress bar.

    Returns:
        The trained model.

    Raises:
        ValueError: If a row of the data is malformed, the towers do not match, or ``output`` has another run.
        DivergedError: As in :func:`st_reba.train.fit`.
    """
    seed = begin(settings, output).seed
    texts = read_sentences(settings.texts)
    evaluator = pairs_evaluator(settings.evaluation, name="dev")
    # A pooler that a checkpoint lacks is initialized at random.
    set_seed(seed)
    options = {name: getattr(settings, name) for name in ("cross_every", "max_seq_length")}
    towers = settings.load(TwinTower, settings.model, second_model_name_or_path=settings.second_model, **options)
    model = SentenceTransformer(modules=[towers, Pooling(towers.get_embedding_dimension(), "cls")])
    names = ("temperature", "info_nce_weight", "interaction_weight", "modulus_weight", "least_cosine")
    loss = JTCSELoss(model, seed=seed, **{name: getattr(settings, name) for name in names})
    fit(model, texts, loss, output, settings, evaluator=evaluator, progress=progress)
    save(model, output)
    return model
