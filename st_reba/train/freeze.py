"""FREEZE: training of small networks on the cached states of a frozen language model."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import batch_to_device, get_device_name
from torch import Tensor, nn
from tqdm import tqdm
from transformers import set_seed

from ..evaluation import PairScoreEvaluator
from ..evaluation.embedded import Embedded, TensorCache
from ..fingerprint import fingerprint, fingerprint_of
from ..hub.card import adopt
from ..modules import LayerStates, LayerwiseAutoencoder
from .fitting import begin, dataset, fit, pairs_evaluator, read_scored_pairs, read_sentences, save, weights_digest
from .losses import EmbeddingCoSENTLoss, LogResidualVarianceLoss, PairScoreMSELoss, ReconstructionLoss
from .settings import STRICT, AtLeast1, PathText, Positive, RunSettings

Stage = Literal["cosines", "siamese", "autoencoder", "whitened"]
Loss = Literal["mse", "log-variance", "cosent"]

#: The default loss of each stage.
_DEFAULT_LOSSES: Mapping[Stage, Loss] = {
    "cosines": "mse", "siamese": "mse", "autoencoder": "log-variance", "whitened": "cosent",
}  # fmt: skip
_LOSSES: Mapping[Loss, type[nn.Module]] = {
    "mse": PairScoreMSELoss, "log-variance": LogResidualVarianceLoss, "cosent": EmbeddingCoSENTLoss,
}  # fmt: skip
#: Maximum number of texts that a whitening is fitted on.
_WHITENED = 4096
#: Settings that affect the pretrained encoders, apart from their data and the trainer's settings.
_PRETRAINING_SETTINGS = (
    "model", "model_kwargs", "template", "pool_over", "max_seq_length", "bottlenecks", "layers", "head_dimension",
    "frozen_weights",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FreezeTraining(RunSettings):
    """Settings of :func:`train_freeze`. The paper gives the bottlenecks, and no other hyperparameters.

    Attributes:
        model: Path or Hub id of a decoder-only model. It is never trained.
        pairs: Pairs of texts with a score: see :func:`st_reba.train.read_scored_pairs`.
        evaluation: Other pairs, on which each epoch is evaluated.
        sentences: Further texts to pretrain the autoencoders on, or to fit the whitening on, in addition to those of
            the pairs: see :func:`st_reba.train.read_sentences`.
        stage: Model of the paper (section 4.2). ``"cosines"``: an MLP on the cosines of the states; ``"siamese"``:
            encoders and MLP, trained together; ``"autoencoder"``: the same, with encoders that were pretrained as
            autoencoders. ``"whitened"`` is ours: the encoders are initialized with a whitening of their states, see
            :meth:`st_reba.modules.LayerwiseAutoencoder.whiten`.
        loss: ``"log-variance"``, the paper's; ``"mse"``, the paper's for its first models; or ``"cosent"``, which
            trains the plain cosine of the embeddings: see :class:`st_reba.train.losses.EmbeddingCoSENTLoss`. None:
            ``"log-variance"`` for ``"autoencoder"``, ``"cosent"`` for ``"whitened"``, else ``"mse"``.
        lowest_score: Score in ``pairs`` that means 0.
        highest_score: Score in ``pairs`` that means 1.
        template: See :class:`st_reba.modules.LayerStates`.
        pool_over: See :class:`st_reba.modules.LayerStates`.
        max_seq_length: Maximum number of tokens per text; None: the model's limit.
        bottlenecks: See :class:`st_reba.modules.LayerwiseAutoencoder`.
        head_dimension: See :class:`st_reba.modules.LayerwiseAutoencoder`.
        layers: Layers whose output states are read: see :class:`st_reba.modules.LayerwiseAutoencoder`.
        pretraining_epochs: Number of epochs over the sentences.
        pretraining_batch_size: Number of texts per step.
        pretraining_learning_rate: Peak learning rate.
        cache: Directory of the cached states; None: ``states`` in the output. Runs can share a cache.
        arguments: As :class:`RunSettings`; the defaults are 12 epochs, batches of 64 and a rate of 1e-3. They apply to
            the pretraining too, except for the three settings above.
        model_kwargs: As :class:`RunSettings`, for the frozen model.
    """

    ARGUMENTS = {"num_train_epochs": 12, "per_device_train_batch_size": 64, "learning_rate": 1e-3}
    SMALLEST_BATCH: ClassVar[int] = 2

    model: PathText
    pairs: PathText
    sentences: PathText | None = None
    stage: Stage = "autoencoder"
    loss: Loss | None = None
    lowest_score: float = 0.0
    highest_score: float = 5.0
    template: str = "{text}"
    pool_over: Literal["text", "all"] | None = None
    max_seq_length: AtLeast1 | None = None
    bottlenecks: Sequence[int] | None = None
    head_dimension: AtLeast1 = 64
    layers: Sequence[int] | None = None
    pretraining_epochs: AtLeast1 = 15
    pretraining_batch_size: AtLeast1 = 256
    pretraining_learning_rate: Positive = 1e-3
    cache: PathText | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lowest_score < self.highest_score:
            raise ValueError(
                f"lowest_score: {self.lowest_score:g} was given, but it must be below highest_score, "
                f"{self.highest_score:g}."
            )
        unused = {
            "bottlenecks": self.bottlenecks and self.stage == "cosines",
            'loss "cosent"': self.loss == "cosent" and self.stage == "cosines",
            "sentences": self.sentences and self.stage in ("cosines", "siamese"),
        }
        for name, is_unused in unused.items():
            if is_unused:
                raise ValueError(f'{name}: not for stage "{self.stage}". Leave it out, or choose another stage.')


def train_freeze(settings: FreezeTraining, output: str | Path, *, progress: bool = True) -> SentenceTransformer:
    """Train encoders and a similarity on the states of a frozen model.

    The model reads each text once, and all epochs read its states from a cache. Checkpoints have the trained weights
    alone; the finished pipeline is saved as ``output/model``.

    Args:
        settings: Settings of the training.
        output: Directory of the run. The same call resumes an interrupted run.
        progress: Whether to show progress bars.

    Returns:
        The finished pipeline: :class:`LayerStates` and :class:`LayerwiseAutoencoder`.

    Raises:
        ValueError: If a row is malformed, or its score is out of range; or as :func:`st_reba.train.fit`.
        DivergedError: If the loss is not finite.
    """
    output = Path(output)
    training_arguments = begin(settings, output)
    if training_arguments.world_size > 1:
        problem = f"FreezeTraining runs in one process, but there are {training_arguments.world_size}."
        raise ValueError(f"{problem} Start it without a launcher.")
    pairs = _scaled_pairs(settings)
    labelled = [*pairs["sentence1"], *pairs["sentence2"]]
    further = [] if settings.sentences is None else read_sentences(settings.sentences)["sentence"]
    # Texts for the pretraining or the whitening.
    sentences = list(dict.fromkeys([*further, *labelled]))
    options: dict[str, Any] = {"name": "evaluation", "batch_size": 256, "write_csv": False}
    evaluator = pairs_evaluator(settings.evaluation, PairScoreEvaluator, **options)
    evaluated = [] if evaluator is None else [*evaluator.first, *evaluator.second]
    options = {name: getattr(settings, name) for name in ("template", "pool_over", "max_seq_length")}
    states = settings.load(LayerStates, settings.model, **options)
    states.requires_grad_(False).to(get_device_name()).eval()
    frozen = weights_digest(states)
    count = len({*labelled, *sentences, *evaluated})
    with tqdm(desc="Reading the model's states", total=count, disable=not progress) as bar:
        cache = StatesCache(settings.cache or output / "states", states, on_texts=bar.update)
        # Added separately, so that the files of the training texts do not depend on the evaluation.
        for texts in (labelled, sentences, evaluated):
            cache.add(texts)

    set_seed(training_arguments.seed)
    sizes = {name: getattr(settings, name) for name in ("bottlenecks", "head_dimension", "layers")}
    parts: dict[str, Any] = {"encoders": settings.stage != "cosines", "decoders": settings.stage == "autoencoder"}
    autoencoder = LayerwiseAutoencoder(states.depth, states.get_embedding_dimension(), **sizes, **parts)
    identity = {**settings.identity(), "pool_over": states.pool_over, "frozen_weights": frozen}
    if settings.stage == "autoencoder":
        pretrained = ModelOnStates.of(autoencoder, cache)
        arguments = {
            **settings.training_arguments,
            "num_train_epochs": settings.pretraining_epochs,
            "per_device_train_batch_size": settings.pretraining_batch_size,
            "learning_rate": settings.pretraining_learning_rate,
        }
        run = RunSettings(arguments=arguments, evaluation=settings.evaluation)
        run_identity = {name: identity[name] for name in _PRETRAINING_SETTINGS if name in identity}
        texts, loss = dataset({"sentence": sentences}), ReconstructionLoss(pretrained)
        fit(pretrained, texts, loss, output / "pretraining", run, identity=run_identity, progress=progress)
        autoencoder = autoencoder.without_decoders()
    elif settings.stage == "whitened":
        sample = random.Random(0).sample(sentences, min(_WHITENED, len(sentences)))
        autoencoder.whiten(cache.states(sample))
        identity["sentences"] = fingerprint_of(sample)
    trained = ModelOnStates.of(autoencoder, cache)
    pair_loss = _LOSSES[settings.loss or _DEFAULT_LOSSES[settings.stage]](trained)
    fit(trained, pairs, pair_loss, output, settings, evaluator=evaluator, identity=identity, progress=progress)
    model = SentenceTransformer(modules=[states, autoencoder])
    # The trainer has noted the training on the card of the part that was trained.
    model.model_card_data = trained.model_card_data
    model.model_card_data.register_model(model)
    adopt(model)
    save(model, output)
    return model


def _scaled_pairs(settings: FreezeTraining) -> Any:
    """Return the pairs with scores scaled to 0 to 1."""
    pairs, low, high = read_scored_pairs(settings.pairs)[:], settings.lowest_score, settings.highest_score
    if outside := [score for score in pairs["score"] if not low <= score <= high]:
        problem = f"{settings.pairs}: the score {outside[0]:g} is not from {low:g} to {high:g}."
        raise ValueError(f"{problem} Correct it, or set lowest_score and highest_score.")
    return dataset({**pairs, "score": [(score - low) / (high - low) for score in pairs["score"]]})


class StatesCache(Embedded):
    """Cache of the output of :class:`st_reba.modules.LayerStates`, in float16 files.

    A file has the states of texts that were added together. Its name identifies the model and its settings, so that
    models can share a directory: see :class:`st_reba.evaluation.embedded.TensorCache`.

    A text takes 2 L D bytes: 48 KiB with GPT-2 medium. Each state is stored with a scale, a power of two, because the
    residual stream of some models exceeds the range of float16. The error is at most 2^-11 of the largest value of the
    state.

    Args:
        directory: Directory of the files.
        module: Module that computes the states.
        chunk_size: Number of texts per file.
        batch_size: Number of texts per forward pass.
        on_texts: Called with the number of texts whenever states were computed or read.
    """

    def __init__(
        self,
        directory: str | Path,
        module: LayerStates,
        *,
        chunk_size: int = 256,
        batch_size: int = 64,
        on_texts: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.module, self._batch_size = module, batch_size
        # The features of a text depend on all settings that affect tokens and masks.
        layout = {name: part.tolist() for name, part in module.preprocess(["a"]).items()}
        key = [
            fingerprint(module.model, module.tokenizer, module.max_seq_length), module.pool_over,
            module.bidirectional_layers, module.normalize_text, module.tokenization, layout,
        ]  # fmt: skip
        cache = TensorCache(Path(directory))

        def cached_states(texts: Sequence[str], prompt: str | None) -> dict[str, Tensor]:
            states = cache.get([key, texts], lambda: self._read(texts))
            on_texts(len(texts))
            return states

        super().__init__(cached_states, chunk_size)

    def states(self, texts: Sequence[str]) -> Tensor:
        """Return the states of texts, (B, L, D), float32, on the CPU; states of new texts are computed first.

        Raises:
            ValueError: If a state is not finite.
        """
        return self.of("states", texts).float() * self.of("scales", texts)[..., None]

    @torch.inference_mode()
    def _read(self, texts: Sequence[str]) -> dict[str, Tensor]:
        batches = []
        for first in range(0, len(texts), self._batch_size):
            batch = texts[first : first + self._batch_size]
            features = batch_to_device(self.module.eval().preprocess(batch), self.module.lm.device)
            batches.append(self.module(features)["layer_states"].float().cpu())
        states = torch.cat(batches)
        if not states.isfinite().all():
            problem = f"States are not finite: the model overflows in {self.module.model.dtype}."
            raise ValueError(f"{problem} Load it in float32 or bfloat16.")
        scales = torch.exp2(torch.frexp(states.abs().amax(dim=-1)).exponent.float())
        return {"states": (states / scales[..., None]).half(), "scales": scales}


class ModelOnStates(SentenceTransformer):
    """SentenceTransformer of the modules after :class:`st_reba.modules.LayerStates`.

    It trains and encodes like any other, and reads the states of texts from a cache.
    """

    _cache: StatesCache

    @classmethod
    def of(cls, module: nn.Module, cache: StatesCache) -> ModelOnStates:
        """Return the model of one module with ``layer_states`` as input."""
        model = cls(modules=[module])
        model._cache = cache
        return model

    def preprocess(self, inputs: Any, prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Return ``layer_states`` (B, L, D), and ``input_ids`` (B,), by which ST's trainer recognizes texts.

        Raises:
            ValueError: If there is a prompt: the cache has states of texts without one.
        """
        if prompt:
            raise ValueError(f"prompt={prompt!r}: cached states have none. Put it into the template of LayerStates.")
        return {"input_ids": torch.arange(len(inputs)), "layer_states": self._cache.states(inputs)}
