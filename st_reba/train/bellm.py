"""BeLLM: contrastive LoRA training of a language model whose last layers attend bidirectionally."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from transformers import set_seed

from ..hub.adapters import merge
from ..modules import BidirectionalLastLayer, CausalTransformer
from ..optional import require
from ..text.presets import TEMPLATES, PoolOver
from .fitting import begin, fit, pairs_evaluator, read_triplets, save, weights_digest
from .settings import CONTRASTIVE, STRICT, AtLeast1, PathText, Positive, RunSettings

#: Folder of the adapter in an output directory.
ADAPTER = "adapter"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BeLLMTraining(RunSettings):
    """Settings of BeLLM's training. The defaults are the paper's values, if it has them.

    Attributes:
        model: Path or Hub id of a decoder-only model.
        triplets: Text, entailed text, contradicting text: see :func:`st_reba.train.read_triplets`.
        evaluation: Scored pairs to evaluate on while training: see :func:`st_reba.train.read_scored_pairs`.
        bidirectional_layers: Layers that attend bidirectionally (Table 4): ``"last"``, the paper's; ``"none"``;
            ``"all"``; or the number of last layers.
        pooling: ``"mean"``, as in the authors' training command; or ``"lasttoken"``, the representative word of the
            paper's text. A bidirectional last layer alone does not change the last token, which sees all others anyway.
        template: Template of the prompt; ``representative-word`` is that of the released code. A name gives its text
            alone; ``pooling`` and ``pool_over`` are set here.
        pool_over: ``"all"``, from the text to the end of the prompt; ``"whole"``, the prompt's beginning and special
            tokens too, as the authors' training command averages; or ``"text"``.
        temperature: tau of Eq. 6. The paper does not give it; the default is that of SimCSE, which it follows.
        rank: Rank of LoRA.
        alpha: LoRA's scale times its rank.
        dropout: Dropout of LoRA.
        target_modules: Names of the layers that LoRA adapts. ``"all-linear"`` gives the paper's 80 million parameters
            on Llama-2-7B; null uses peft's default, which exists for some architectures.
        max_seq_length: Maximum number of tokens per text.
        arguments: As :class:`RunSettings`; the defaults are batches of 64 without duplicates and a rate of 2e-4.
        model_kwargs: As :class:`RunSettings`, for the frozen weights; LoRA's are float32.
    """

    ARGUMENTS = {**CONTRASTIVE, "learning_rate": 2e-4}

    model: PathText
    triplets: PathText
    bidirectional_layers: Annotated[int, Field(ge=0)] | Literal["none", "last", "all"] = "last"
    pooling: Literal["mean", "lasttoken"] = "mean"
    template: str = "representative-word"
    pool_over: PoolOver = "all"
    temperature: Positive = 0.05
    rank: AtLeast1 = 32
    alpha: Positive = 32
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    target_modules: Sequence[str] | Literal["all-linear"] | None = "all-linear"
    max_seq_length: AtLeast1 | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if "quantization_config" in self.model_kwargs:
            raise ValueError("model_kwargs: leave out quantization_config: an adapter is merged into full weights.")


def train_bellm(settings: BeLLMTraining, output: str | Path, *, progress: bool = True) -> SentenceTransformer:
    r"""Train BeLLM on triplets, and save the adapter and the merged model.

    .. math:: L = -\frac{1}{N} \sum_i \log \frac{e^{\cos(h_i, h_i^+) / \tau}}
        {\sum_j e^{\cos(h_i, h_j^+) / \tau} + e^{\cos(h_i, h_j^-) / \tau}}

    (Eq. 6; the paper takes the sum, sentence-transformers the mean.)

    Args:
        settings: Settings of the training.
        output: Directory of the run. It has ``checkpoints`` during training, then ``adapter``, which needs the backbone
            under its present name, and ``model``, which is self-contained. Both load with
            ``SentenceTransformer(path)``. An interrupted run is resumed.
        progress: Whether to show a progress bar.

    Returns:
        The merged model.

    Raises:
        ValueError: If the data or the model do not fit, or ``output`` has a finished model or another run.
        DivergedError: See :func:`st_reba.train.fit`.
        ImportError: If peft, datasets or accelerate is not installed.
    """
    output = Path(output)
    arguments = begin(settings, output)
    triplets = read_triplets(settings.triplets)
    evaluator = pairs_evaluator(settings.evaluation, main_similarity="cosine", write_csv=False)
    model = build_bellm(settings)
    identity = {"frozen_weights": weights_digest(model)}
    # Loading may draw random numbers, and more of them when a process first loads a backbone.
    set_seed(arguments.seed)
    add_lora(model, settings)
    scale, gather = 1 / settings.temperature, arguments.world_size > 1
    loss = MultipleNegativesRankingLoss(model, scale=scale, gather_across_devices=gather)
    fit(model, triplets, loss, output, settings, evaluator=evaluator, identity=identity, progress=progress)
    model.eval()
    save(model, output, ADAPTER)
    merge_adapter(model)
    save(model, output)
    return model


def build_bellm(settings: BeLLMTraining) -> SentenceTransformer:
    """Return the model before training: the language model, pooling, normalization.

    Warns if the bidirectional layers of ``settings`` change nothing.
    """
    # An adapter is saved with its backbone's path, which must be valid in any directory.
    path = Path(settings.model)
    name = str(path.resolve()) if path.is_dir() else settings.model
    counts: dict[Any, float] = {"none": 0, "last": 1, "all": 1.0}
    # A share of the layers, if it is a float.
    layers = counts.get(settings.bidirectional_layers, settings.bidirectional_layers)
    module = settings.load(
        BidirectionalLastLayer if layers else CausalTransformer,
        name,
        # The text of a template: its name would also set how the untrained model is pooled.
        template=TEMPLATES.get(settings.template, settings.template),
        pool_over=settings.pool_over,
        bidirectional_layers=layers,
        max_seq_length=settings.max_seq_length,
    )
    if module.bidirectional_layers == 1 and settings.pooling == "lasttoken":
        problem = 'pooling="lasttoken" reads the last token alone, which sees all others under the causal mask, too:'
        advice = 'one bidirectional layer changes nothing. Use pooling="mean", or more bidirectional layers.'
        warnings.warn(f"{problem} {advice}", stacklevel=2)
    pooling = Pooling(module.get_embedding_dimension(), settings.pooling)
    return SentenceTransformer(modules=[module, pooling, Normalize()])


def add_lora(model: SentenceTransformer, settings: BeLLMTraining) -> None:
    """Add a new adapter to the backbone, and freeze all other weights.

    Args:
        model: Model whose first module has the backbone.
        settings: Rank, alpha, dropout and target modules of the adapter.

    Raises:
        ValueError: If the target modules do not exist, or peft has no default for the architecture.
        ImportError: If peft is not installed.
    """
    peft = require("peft", "train", "A LoRA adapter")
    sizes = {"r": settings.rank, "lora_alpha": settings.alpha, "lora_dropout": settings.dropout}
    model.add_adapter(peft.LoraConfig(**sizes, target_modules=settings.target_modules))
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Half precision would round most updates to zero.
            parameter.data = parameter.data.float()


def merge_adapter(model: SentenceTransformer) -> None:
    """Merge the active adapter into the weights of the backbone, in place, and remove all adapters.

    Raises:
        ValueError: If there is none, or it cannot be merged.
        ImportError: If peft is not installed.
    """
    merge(model[0].model)
