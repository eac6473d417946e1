"""Training JTCSE: two encoders, and texts without labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation import BaseEvaluator
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import set_seed

from ..files import check_free
from ..losses import JTCSELoss
from ..modules import TwinTower
from .fitting import MODEL, asked, finish, fit
from .rows import read_scored_pairs, read_sentences
from .settings import RunSettings, setting


@dataclass(frozen=True, kw_only=True)
class JTCSETraining(RunSettings):
    """What :func:`train_jtcse` is asked for.

    Numbers that the paper's text does not have are those of the authors' published script, which are for towers that
    SimCSE has trained before. Towers that it has not need a higher learning rate: 3e-5 is SimCSE's.

    Attributes:
        model: Tower I, an encoder's path or Hub id.
        texts: As for :func:`st_reba.training.read_sentences`.
        second_model: Tower II; None: a copy of tower I.
        evaluation: Scored pairs to evaluate on while training: see :func:`st_reba.training.read_scored_pairs`.
        cross_every: As for :class:`st_reba.TwinTower`; 0 trains TNCSE.
        max_seq_length: Tokens of a text.
        no_duplicates: Whether no text may stand twice in a batch, where it would be its own negative.
        temperature: As for :class:`st_reba.losses.JTCSELoss`, and so are the weights and ``least_cosine``.
    """

    model: str
    texts: str = setting(may_change=True)
    second_model: str | None = None
    evaluation: str | None = setting(None, may_change=True)
    cross_every: int = setting(2, least=0)
    max_seq_length: int = setting(64, least=3)
    no_duplicates: bool = True
    temperature: float = setting(0.05, above=0)
    info_nce_weight: float = setting(1.0, least=0)
    interaction_weight: float = setting(1.0, least=0)
    modulus_weight: float = setting(1.0, least=0)
    least_cosine: float = setting(1e-4, above=0, below=1)
    batch_size: int = setting(64, least=2)
    learning_rate: float = setting(1.3e-6, above=0)
    weight_decay: float = setting(0.01, least=0)
    evaluation_steps: int | None = setting(100, least=1, may_change=True)


def train_jtcse(settings: JTCSETraining, output: str | Path, *, progress: bool = True) -> SentenceTransformer:
    """Train two towers on texts, and save the model as ``output/model``.

    Args:
        settings: What is asked for.
        output: The run's directory; see :func:`st_reba.training.fit`.
        progress: Whether to show a bar.

    Returns:
        The trained model.

    Raises:
        ValueError: If a row of the data is malformed, the towers do not fit together, or ``output`` is another run's.
        DivergedError: As in :func:`st_reba.training.fit`.
    """
    check_free(Path(output) / MODEL, "output")
    texts = read_sentences(settings.texts)
    evaluator = None if settings.evaluation is None else _evaluator(settings.evaluation)
    # A pooler that a checkpoint lacks is drawn at random.
    set_seed(settings.seed)
    towers = TwinTower(
        settings.model,
        settings.second_model,
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
        seed=settings.seed,
    )
    fit(
        model,
        texts,
        loss,
        output=output,
        **asked(settings),
        evaluator=evaluator,
        no_duplicates=settings.no_duplicates,
        identity=settings.identity(),
        progress=progress,
    )
    with finish(output) as directory:
        model.save_pretrained(str(directory))
    return model


def _evaluator(pairs: str) -> BaseEvaluator:
    rows = read_scored_pairs(pairs)
    return EmbeddingSimilarityEvaluator(rows["sentence1"], rows["sentence2"], rows["score"], name="dev")
