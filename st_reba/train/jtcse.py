"""Training JTCSE: two encoders, and texts without labels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import set_seed

from ..modules import TwinTower
from .fitting import begin, fit, save
from .losses import JTCSELoss
from .rows import pairs_evaluator, read_sentences
from .settings import STRICT, NotNegative, PathText, Positive, RunSettings


@dataclass(frozen=True, kw_only=True, config=STRICT)
class JTCSETraining(RunSettings):
    """What :func:`train_jtcse` is asked for.

    Numbers that the paper's text does not have are those of the authors' published script, which are for towers that
    SimCSE has trained before. Towers that it has not need a higher learning rate: 3e-5 is SimCSE's.

    Attributes:
        model: Tower I, an encoder's path or Hub id.
        texts: As for :func:`st_reba.train.read_sentences`.
        second_model: Tower II; None: a copy of tower I.
        evaluation: Scored pairs to evaluate on while training: see :func:`st_reba.train.read_scored_pairs`.
        cross_every: As for :class:`st_reba.TwinTower`; 0 trains TNCSE.
        max_seq_length: Tokens of a text.
        temperature: As for :class:`st_reba.train.losses.JTCSELoss`, and so are the weights and ``least_cosine``.
        arguments: As :class:`RunSettings`; batches of 64 with no text twice, a rate of 1.3e-6, a decay of 0.01.
        model_kwargs: As :class:`RunSettings`, for both towers.
    """

    ARGUMENTS: ClassVar[Mapping[str, Any]] = {
        "per_device_train_batch_size": 64,
        "learning_rate": 1.3e-6,
        "weight_decay": 0.01,
        "batch_sampler": "no_duplicates",
    }
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
        settings: What is asked for.
        output: The run's directory; see :func:`st_reba.train.fit`.
        progress: Whether to show a bar.

    Returns:
        The trained model.

    Raises:
        ValueError: If a row of the data is malformed, the towers do not fit together, or ``output`` is another run's.
        DivergedError: As in :func:`st_reba.train.fit`.
    """
    seed = begin(settings, output).seed
    texts = read_sentences(settings.texts)
    evaluator = pairs_evaluator(settings.evaluation, name="dev")
    # A pooler that a checkpoint lacks is drawn at random.
    set_seed(seed)
    towers = settings.load(
        TwinTower,
        settings.model,
        second_model_name_or_path=settings.second_model,
        cross_every=settings.cross_every,
        max_seq_length=settings.max_seq_length,
    )
    model = SentenceTransformer(modules=[towers, Pooling(towers.get_embedding_dimension(), "cls")])
    of_the_loss = ("temperature", "info_nce_weight", "interaction_weight", "modulus_weight", "least_cosine")
    loss = JTCSELoss(model, seed=seed, **{name: getattr(settings, name) for name in of_the_loss})
    fit(model, texts, loss, output, settings, evaluator=evaluator, progress=progress)
    save(model, output)
    return model
