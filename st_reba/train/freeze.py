"""FREEZE: training on what a language model says, without touching it. It reads each text once: its states are kept."""

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
from ..hub.card import take_training
from ..lm.backbone import device
from ..lm.fingerprint import fingerprint
from ..modules import LayerStates, LayerwiseAutoencoder
from .fitting import begin, data_digest, fit, save, weights_digest
from .losses import EmbeddingCoSENTLoss, LogResidualVarianceLoss, PairScoreMSELoss, ReconstructionLoss
from .rows import dataset, read_scored_pairs, read_sentences
from .settings import STRICT, AtLeast1, PathText, Positive, RunSettings

Stage = Literal["cosines", "siamese", "autoencoder", "whitened"]
Loss = Literal["mse", "log-variance", "cosent"]

#: The default loss of each stage.
_USUAL: Mapping[Stage, Loss] = {
    "cosines": "mse", "siamese": "mse", "autoencoder": "log-variance", "whitened": "cosent",
}  # fmt: skip
_LOSSES: Mapping[Loss, type[nn.Module]] = {
    "mse": PairScoreMSELoss, "log-variance": LogResidualVarianceLoss, "cosent": EmbeddingCoSENTLoss,
}  # fmt: skip
#: Texts that a whitening is fitted on, at most.
_WHITENED = 4096
#: What decides the pretrained encoders, beside their data and the trainer's own settings.
_OF_PRETRAINING = (
    "model", "model_kwargs", "template", "pool_over", "max_seq_length", "bottlenecks", "layers", "head_dimension",
    "frozen_weights",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FreezeTraining(RunSettings):
    """What :func:`train_freeze` is asked for. Of its hyperparameters the paper gives the bottlenecks alone.

    Attributes:
        model: A decoder-only model's path or Hub id. It is read, never trained.
        pairs: Pairs of texts with a score: see :func:`st_reba.train.read_scored_pairs`.
        evaluation: Other pairs, on which each epoch is evaluated.
        sentences: Texts that the autoencoders are pretrained on, or the whitening is fitted on, beside those of the
            pairs: see :func:`st_reba.train.read_sentences`.
        stage: Which of the paper's models (section 4.2). ``"cosines"``: an MLP on the cosines of the states;
            ``"siamese"``: encoders and MLP, trained together; ``"autoencoder"``: the same, of which the encoders were
            first trained to be decoded. ``"whitened"`` is ours: the encoders begin as a whitening of their states, see
            :meth:`st_reba.modules.LayerwiseAutoencoder.whiten`.
        loss: ``"log-variance"``, or the ``"mse"`` that the paper used before; or ``"cosent"``, which trains the plain
            cosine of the embeddings: see :class:`st_reba.train.losses.EmbeddingCoSENTLoss`. None: the first for
            ``"autoencoder"``, the last for ``"whitened"``, and ``"mse"`` for the other two.
        lowest_score: The score in ``pairs`` that means 0.
        highest_score: The score in ``pairs`` that means 1.
        template: See :class:`st_reba.modules.LayerStates`.
        pool_over: See :class:`st_reba.modules.LayerStates`.
        max_seq_length: Tokens of a text; None: what the model has room for.
        bottlenecks: See :class:`st_reba.modules.LayerwiseAutoencoder`.
        head_dimension: See :class:`st_reba.modules.LayerwiseAutoencoder`.
        layers: Behind which layers states are read: see :class:`st_reba.modules.LayerwiseAutoencoder`.
        pretraining_epochs: Passes over the sentences.
        pretraining_batch_size: Texts a step.
        pretraining_learning_rate: At its highest.
        cache: Directory of the states; None: ``states`` in the output. One cache serves any number of runs.
        arguments: As :class:`RunSettings`; 12 epochs in batches of 64, a rate of 1e-3. The pretraining has them too,
            but for the three that are named above.
        model_kwargs: As :class:`RunSettings`, for the frozen model.
    """

    ARGUMENTS: ClassVar[Mapping[str, Any]] = {
        "num_train_epochs": 12,
        "per_device_train_batch_size": 64,
        "learning_rate": 1e-3,
    }
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
        unfit = {
            "bottlenecks": "has no encoders" if self.stage == "cosines" else "",
            "sentences": "reads no further texts" if self.stage in ("cosines", "siamese") else "",
        }
        for name, why in unfit.items():
            if why and getattr(self, name) is not None:
                raise ValueError(f'{name}: stage "{self.stage}" {why}. Leave it out, or choose another stage.')
        if self.stage == "cosines" and self.loss == "cosent":
            raise ValueError(
                'loss: "cosent" trains the embeddings, and those of stage "cosines" have nothing to train. Choose '
                "another loss, or another stage."
            )


def train_freeze(settings: FreezeTraining, output: str | Path, *, progress: bool = True) -> SentenceTransformer:
    """Train encoders and a similarity on a frozen model's states.

    The model reads each text once; its states go into a cache, and every epoch takes them from there. Checkpoints hold
    what is trained, which is all but the model, and the finished pipeline lies in ``output/model``.

    Args:
        settings: What is asked for.
        output: The run's directory. Where a run was interrupted, the same call goes on.
        progress: Whether to show bars.

    Returns:
        The finished pipeline: :class:`LayerStates` and :class:`LayerwiseAutoencoder`.

    Raises:
        ValueError: If a row is malformed, or its score is out of range; or as :func:`st_reba.train.fit`.
        DivergedError: If the loss is no longer a finite number.
    """
    output = Path(output)
    begun = begin(settings, output)
    if begun.world_size > 1:
        raise ValueError(
            f"FreezeTraining is for one process, and there are {begun.world_size}: what it trains is small. Start it "
            "without a launcher."
        )
    pairs = _scaled_pairs(settings)
    labelled = [*pairs["sentence1"], *pairs["sentence2"]]
    further = [] if settings.sentences is None else read_sentences(settings.sentences)["sentence"]
    # What the encoders see before the labels.
    sentences = list(dict.fromkeys([*further, *labelled])) if settings.stage in ("autoencoder", "whitened") else []
    evaluator: PairScoreEvaluator | None = None
    if settings.evaluation is not None:
        columns = read_scored_pairs(settings.evaluation)[:].values()
        evaluator = PairScoreEvaluator(*columns, name="evaluation", batch_size=256, write_csv=False)
    evaluated = [] if evaluator is None else [*evaluator.first, *evaluator.second]
    options = {name: getattr(settings, name) for name in ("template", "pool_over", "max_seq_length")}
    states = settings.load(LayerStates, settings.model, **options)
    states.requires_grad_(False).to(get_device_name()).eval()
    before = weights_digest(states)
    count = len({*labelled, *sentences, *evaluated})
    with tqdm(desc="Reading the model's states", total=count, disable=not progress) as bar:
        cache = StatesCache(settings.cache or output / "states", states, on_texts=bar.update)
        # One after the other: what is trained on lies in the same files, whatever is evaluated.
        for texts in (labelled, sentences, evaluated):
            cache.add(texts)

    set_seed(begun.seed)
    autoencoder = LayerwiseAutoencoder(
        states.depth,
        states.get_embedding_dimension(),
        bottlenecks=settings.bottlenecks,
        head_dimension=settings.head_dimension,
        encoders=settings.stage != "cosines",
        decoders=settings.stage == "autoencoder",
        layers=settings.layers,
    )
    identity = {**settings.identity(), "pool_over": states.pool_over, "frozen_weights": before}
    if settings.stage == "autoencoder":
        pretrained = ModelOnStates.of(autoencoder, cache)
        arguments = {
            **settings.training_arguments,
            "num_train_epochs": settings.pretraining_epochs,
            "per_device_train_batch_size": settings.pretraining_batch_size,
            "learning_rate": settings.pretraining_learning_rate,
        }
        asked, texts = (
            RunSettings(arguments=arguments, evaluation=settings.evaluation),
            dataset({"sentence": sentences}),
        )
        known = {name: identity[name] for name in _OF_PRETRAINING if name in identity}
        texts, loss = dataset({"sentence": sentences}), ReconstructionLoss(pretrained)
        fit(pretrained, texts, loss, output / "pretraining", asked, identity=known, progress=progress)
        autoencoder = autoencoder.without_decoders()
    elif settings.stage == "whitened":
        sample = random.Random(0).sample(sentences, min(_WHITENED, len(sentences)))
        autoencoder.whiten(cache.states(sample))
        identity["sentences"] = data_digest(dataset({"sentence": sample}))
    trained = ModelOnStates.of(autoencoder, cache)
    of_pairs = _LOSSES[settings.loss or _USUAL[settings.stage]](trained)
    fit(trained, pairs, of_pairs, output, settings, evaluator=evaluator, identity=identity, progress=progress)
    model = SentenceTransformer(modules=[states, autoencoder])
    take_training(model, trained)
    save(model, output)
    return model


def _scaled_pairs(settings: FreezeTraining) -> Any:
    """Pairs with scores from 0 to 1."""
    pairs, low, high = read_scored_pairs(settings.pairs)[:], settings.lowest_score, settings.highest_score
    for number, score in enumerate(pairs["score"], start=1):
        if not low <= score <= high:
            raise ValueError(
                f"{settings.pairs}, pair {number}: the score {score:g} is not from {low:g} to {high:g}. Correct it, or "
                "set lowest_score and highest_score."
            )
    return dataset({**pairs, "score": [(score - low) / (high - low) for score in pairs["score"]]})


class StatesCache(Embedded):
    """What :class:`st_reba.modules.LayerStates` reads of texts, kept in float16 in a directory.

    A file holds the states of some texts that were added together. Its name tells the model and its settings from
    others, so that one directory serves many models: see :class:`st_reba.evaluation.embedded.TensorCache`.

    A text takes 2 L D bytes: 48 KiB with GPT-2 medium. A state is stored with a scale of its own, a power of two, since
    the residual stream of some models leaves the range of float16; what is read back is within 2^-11 of the largest
    number in the state.

    Args:
        directory: Where the files of all models lie.
        module: The model whose states they are.
        chunk_size: Texts that are kept as one file.
        batch_size: Texts that the model reads at a time.
        on_texts: Called with the number of texts whenever some more are known.
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
        # How the module lays a text out goes in with what it is.
        layout = {name: part.tolist() for name, part in module.preprocess(["a"]).items()}
        key = [
            fingerprint(module.model, module.tokenizer, module.max_seq_length), module.pool_over,
            module.bidirectional_layers, module.normalize_text, module.tokenization, layout,
        ]  # fmt: skip
        cache = TensorCache(Path(directory))

        def kept(texts: Sequence[str], prompt: str | None) -> dict[str, Tensor]:
            found = cache.get([key, texts], lambda: self._read(texts))
            on_texts(len(texts))
            return found

        super().__init__(kept, chunk_size)

    def states(self, texts: Sequence[str]) -> Tensor:
        """The states of texts, (B, L, D), float32, on the CPU; those that were not added are read first.

        Raises:
            ValueError: If a state is not finite, so that nothing could be learnt from it.
        """
        return self.of("states", texts).float() * self.of("scales", texts)[..., None]

    @torch.inference_mode()
    def _read(self, texts: Sequence[str]) -> dict[str, Tensor]:
        batches = []
        for first in range(0, len(texts), self._batch_size):
            batch = texts[first : first + self._batch_size]
            features = batch_to_device(self.module.eval().preprocess(batch), device(self.module.model))
            batches.append(self.module(features)["layer_states"].float().cpu())
            if not batches[-1].isfinite().all():
                bad = next(text for text, own in zip(batch, batches[-1], strict=True) if not own.isfinite().all())
                raise ValueError(
                    f"The states of {bad!r} are not finite: the model overflows in {self.module.model.dtype}. Load it "
                    "in float32 or bfloat16."
                )
        states = torch.cat(batches)
        scales = torch.exp2(torch.frexp(states.abs().amax(dim=-1)).exponent.float())
        return {"states": (states / scales[..., None]).half(), "scales": scales}


class ModelOnStates(SentenceTransformer):
    """What stands behind :class:`st_reba.modules.LayerStates` in a pipeline, as a model of its own.

    It trains and encodes like any other, and takes the states of texts from a cache.
    """

    _cache: StatesCache

    @classmethod
    def of(cls, module: nn.Module, cache: StatesCache) -> ModelOnStates:
        """Return the model of one module, which takes ``layer_states``."""
        model = cls(modules=[module])
        model._cache = cache
        return model

    def preprocess(self, inputs: Any, prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """``layer_states`` (B, L, D), and ``input_ids``, by which ST's trainer knows a column of texts: (B,) numbers.

        Raises:
            ValueError: If there is a prompt: the cache holds texts as its module lays them out, without one.
        """
        if prompt:
            raise ValueError(f"prompt={prompt!r}: cached states have none. Put it into the template of LayerStates.")
        return {"input_ids": torch.arange(len(inputs)), "layer_states": self._cache.states(inputs)}
