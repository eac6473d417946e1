"""BeLLM's training: LoRA on a language model whose last layers attend both ways, contrastive with hard negatives."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from torch import nn
from transformers import set_seed

from ..hub.card import take_training
from ..lm import backbone
from ..modules import BidirectionalLastLayer, CausalModule, CausalTransformer
from ..modules.checkpoints import SafeTransformer
from ..optional import require
from ..text.templates import TEMPLATES, PoolOver
from .fitting import begin, fit_as_set, publish, save, weights_digest
from .losses import ContrastiveAngleLoss
from .rows import pairs_evaluator, read_triplets
from .settings import RunSettings, setting

#: Where in an output directory the adapter lies.
ADAPTER = "adapter"


@dataclass(frozen=True, kw_only=True)
class BeLLMTraining(RunSettings):
    """What BeLLM's training is asked for. Where the paper gives a value, it is the default.

    Attributes:
        model: A decoder-only model's path or Hub id.
        triplets: Text, entailed text, contradicting text: see :func:`st_reba.train.read_triplets`.
        evaluation: Scored pairs to evaluate on while training: see :func:`st_reba.train.read_scored_pairs`.
        bidirectional_layers: Which layers attend both ways (Table 4): ``"last"``, the paper's; ``"none"``; ``"all"``;
            or how many of the last ones.
        pooling: ``"mean"``, as the authors' training command has it; or ``"lasttoken"``, the representative word of the
            paper's text. The last token sees every other one in any
            case, so turning the last layer alone changes nothing there.
        template: Around the text; ``representative-word`` is the one of the released code. A name stands for its text
            alone: how it is read is said here.
        pool_over: ``"all"``, from the text to the end of the prompt; ``"whole"``, the prompt's beginning and special
            tokens too, as the authors' training command averages; or ``"text"``.
        temperature: tau of Eq. 6, which the paper does not give: SimCSE's, whose setting it follows.
        contrastive_weight: Of Eq. 6, where there is an angle loss beside it.
        angle_weight: Of AnglE's angle loss, which the paper does not have and the released command has: see
            :class:`st_reba.train.losses.ContrastiveAngleLoss`.
        angle_scale: By which differences of angles are multiplied.
        rank: Of LoRA.
        alpha: LoRA's scale times its rank.
        dropout: Of LoRA.
        target_modules: Names of the layers that LoRA adapts. ``"all-linear"`` gives the paper's 80 million parameters
            on Llama-2-7B; null leaves it to peft, which has a default for some architectures.
        max_seq_length: Tokens of a text, at most.
        arguments: As :class:`RunSettings`; batches of 64 with no text twice, a rate of 2e-4.
        model_kwargs: As :class:`RunSettings`, for the frozen weights; LoRA's are float32.

    ``BeLLMTraining.of_preset("released", model=..., triplets=...)`` has the settings of the training command that the
    authors' repository gives, on one device, but its backbone in 4 bits.
    """

    ARGUMENTS: ClassVar[Mapping[str, Any]] = {
        "per_device_train_batch_size": 64,
        "learning_rate": 2e-4,
        "batch_sampler": "no_duplicates",
    }
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "released": {
            "contrastive_weight": 20.0,
            "angle_weight": 1.0,
            "rank": 64,
            "alpha": 128,
            "pool_over": "whole",
            "max_seq_length": 60,
            "arguments": {
                "per_device_train_batch_size": 256,
                "gradient_accumulation_steps": 32,
                "num_train_epochs": 3,
                "warmup_steps": 80,
            },
        }
    }

    model: str
    triplets: str = setting(may_change=True)
    bidirectional_layers: Annotated[int, Field(ge=0)] | Literal["none", "last", "all"] = "last"
    pooling: Literal["mean", "lasttoken"] = "mean"
    template: str = "representative-word"
    pool_over: PoolOver = "all"
    temperature: float = setting(0.05, above=0)
    contrastive_weight: float = setting(1.0, least=0)
    angle_weight: float = setting(0.0, least=0)
    angle_scale: float = setting(20.0, above=0)
    rank: int = setting(32, least=1)
    alpha: float = setting(32, above=0)
    dropout: float = setting(0.1, least=0, below=1)
    target_modules: tuple[str, ...] | Literal["all-linear"] | None = "all-linear"
    max_seq_length: int | None = setting(None, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.contrastive_weight and not self.angle_weight:
            raise ValueError("contrastive_weight and angle_weight: one of them must be above 0.")


def train_bellm(settings: BeLLMTraining, output: str | Path, *, progress: bool = True) -> SentenceTransformer:
    r"""Train BeLLM on triplets, and write the adapter and the merged model.

    .. math:: L = -\frac{1}{N} \sum_i \log \frac{e^{\cos(h_i, h_i^+) / \tau}}
        {\sum_j e^{\cos(h_i, h_j^+) / \tau} + e^{\cos(h_i, h_j^-) / \tau}}

    (Eq. 6; the paper has the sum, ST the mean.)

    Args:
        settings: What is asked for.
        output: Directory of the run: ``checkpoints`` while it lasts, then ``adapter``, which needs the backbone to be
            found under the name it has now, and ``model``, which is complete in itself. Both load with
            ``SentenceTransformer(path)``. Where a run was interrupted, it goes on.
        progress: Whether to show a bar.

    Returns:
        The merged model.

    Raises:
        ValueError: If the data or the model do not fit, or ``output`` holds a finished model or another run.
        DivergedError: See :func:`st_reba.train.fit`.
        ImportError: If peft, datasets or accelerate is not installed.
    """
    output = Path(output)
    devices = int(begin(settings, output).world_size)
    triplets = read_triplets(settings.triplets)
    evaluator = pairs_evaluator(
        settings.evaluation, batch_size=settings.batch_rows, main_similarity="cosine", write_csv=False
    )
    model = build_bellm(settings)
    frozen = weights_digest(model)
    # Loading may draw numbers, more where a process loads a backbone for the first time.
    set_seed(settings.random_seed)
    add_lora(model, settings)
    loss, identity = _loss(model, settings, gather_across_devices=devices > 1), {"frozen_weights": frozen}
    fit_as_set(settings, model, triplets, loss, output, evaluator=evaluator, progress=progress, identity=identity)
    model.eval()
    save(model, output, ADAPTER)
    if getattr(model[0].model, "hf_quantizer", None) is not None:
        model = _dequantized(settings, model)
    merge_adapter(model)
    save(model, output)
    publish(settings, output)
    return model


def _loss(model: SentenceTransformer, settings: BeLLMTraining, *, gather_across_devices: bool) -> nn.Module:
    """Eq. 6, over the rows of all devices; with AnglE's loss beside it where it has a weight."""
    if not settings.angle_weight:
        return MultipleNegativesRankingLoss(
            model, scale=1 / settings.temperature, gather_across_devices=gather_across_devices
        )
    return ContrastiveAngleLoss(
        model,
        temperature=settings.temperature,
        contrastive_weight=settings.contrastive_weight,
        angle_weight=settings.angle_weight,
        angle_scale=settings.angle_scale,
        gather_across_devices=gather_across_devices,
    )


def build_bellm(settings: BeLLMTraining) -> SentenceTransformer:
    """The model before training: the language model, pooling, unit length.

    Warns if ``settings`` turn a layer in a way that cannot be felt.
    """
    # An adapter is saved with its backbone's name, which shall be found from any directory.
    path = Path(settings.model)
    name = str(path.resolve()) if path.is_dir() else settings.model
    loaded = settings.load(SafeTransformer, name, max_seq_length=settings.max_seq_length)
    count = settings.bidirectional_layers
    if isinstance(count, str):
        count = {"none": 0, "last": 1, "all": backbone.depth(loaded.model)}[count]
    # The text of a template, not its name: training does not read it as those do who use the model as it is.
    template = TEMPLATES.get(settings.template, settings.template)
    module: CausalModule
    if count == 0:
        module = CausalTransformer(loaded, template=template, pool_over=settings.pool_over)
    else:
        module = BidirectionalLastLayer(
            loaded, template=template, pool_over=settings.pool_over, bidirectional_layers=count
        )
        if count == 1 and settings.pooling == "lasttoken":
            warnings.warn(
                'pooling="lasttoken" reads the last token alone, which sees all others with the causal mask, too: '
                'turning the last layer changes nothing. Use pooling="mean", or turn more layers.',
                stacklevel=2,
            )
    pooling = Pooling(module.get_embedding_dimension(), settings.pooling)
    return SentenceTransformer(modules=[module, pooling, Normalize()])


def add_lora(model: SentenceTransformer, settings: Any) -> None:
    """Give the backbone a fresh adapter, and train nothing else.

    Args:
        model: Its first module has the backbone.
        settings: Has ``rank``, ``alpha``, ``dropout`` and ``target_modules``, as :class:`BeLLMTraining` has.

    Raises:
        ValueError: If there are no such layers, or peft has no default for the architecture.
        ImportError: If peft is not installed.
    """
    peft = require("peft", "train", "A LoRA adapter")
    targets = settings.target_modules
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(targets) if isinstance(targets, tuple) else targets,
    )
    try:
        model.add_adapter(config)
    except ValueError as error:
        raise ValueError(
            f"target_modules={targets!r}: peft cannot adapt {type(model[0].model).__name__} ({error}). "
            'Use "all-linear", or the names of some of its linear layers.'
        ) from None
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Half precision would round most steps away.
            parameter.data = parameter.data.float()


def merge_adapter(model: SentenceTransformer) -> None:
    """Add what an adapter learnt to the weights of the backbone, in place, and remove the adapter."""
    require("peft", "train", "A LoRA adapter")
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted: Any = model[0].model
    names = adapted.active_adapters()
    for name, layer in list(adapted.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            with torch.no_grad():
                layer.merge(safe_merge=True)
            adapted.set_submodule(name, layer.get_base_layer())
    adapted.delete_adapter(names)
    for parameter in adapted.parameters():
        parameter.requires_grad_(parameter.is_floating_point())


def _dequantized(settings: BeLLMTraining, trained: SentenceTransformer) -> SentenceTransformer:
    """The backbone loaded anew, not in few bits, with the adapter: merged into few bits, most would be rounded away."""
    kept = {name: value for name, value in settings.model_kwargs.items() if name != "quantization_config"}
    whole = build_bellm(replace(settings, model_kwargs=kept))
    add_lora(whole, settings)
    learnt = {name: value for name, value in trained.state_dict().items() if ".lora_" in name}
    _, unknown = whole.load_state_dict(learnt, strict=False)
    assert not unknown, "both have the same layers"
    take_training(whole, trained)
    return whole
