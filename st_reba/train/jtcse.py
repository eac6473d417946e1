"""Training JTCSE: two encoders, and texts without labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import set_seed

from ..modules import TwinTower
from .fitting import begin, fit_as_set, publish, save
from .losses import JTCSELoss
from .rows import pairs_evaluator, read_sentences
from .settings import RunSettings, setting


@dataclass(frozen=True, kw_only=True)
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
        arguments: As :class:`RunSettings`; batches of 64 with no text twice, a rate of 1.3e-6, a decay of 0.01, an
            evaluation every 100 steps.
        model_kwargs: As :class:`RunSettings`, for both towers.
    """

    ARGUMENTS: ClassVar[Mapping[str, Any]] = {
        "per_device_train_batch_size": 64,
        "learning_rate": 1.3e-6,
        "weight_decay": 0.01,
        "eval_steps": 100,
        "batch_sampler": "no_duplicates",
    }
    SMALLEST_BATCH: ClassVar[int] = 2

    model: str
    texts: str = setting(may_change=True)
    second_model: str | None = None
    cross_every: int = setting(2, least=0)
    max_seq_length: int = setting(64, least=3)
    temperature: float = setting(0.05, above=0)
    info_nce_weight: float = setting(1.0, least=0)
    interaction_weight: float = setting(1.0, least=0)
    modulus_weight: float = setting(1.0, least=0)
    least_cosine: float = setting(1e-4, above=0, below=1)


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
    begin(settings, output)
    texts = read_sentences(settings.texts)
    evaluator = pairs_evaluator(settings.evaluation, name="dev")
    # A pooler that a checkpoint lacks is drawn at random.
    set_seed(settings.random_seed)
    towers = settings.load(
        TwinTower,
        settings.model,
        second_model_name_or_path=settings.second_model,
        cross_every=settings.cross_every,
        max_seq_length=settings.max_seq_length,
    )
    model = SentenceTransformer(modules=[towers, Pooling(towers.get_embedding_dimension(), "cls")])
    loss = JTCSELoss(
        model,
        temperature=settings.temperature,
        info_nce_weight=settings.info_nce_weight,
        interaction_weight=settings.interaction_weight,
        modulus_weight=settings.modulus_weight,
        least_cosine=settings.least_cosine,
        seed=settings.random_seed,
    )
    fit_as_set(settings, model, texts, loss, Path(output), evaluator=evaluator, progress=progress)
    save(model, output)
    publish(settings, output)
    return model
