"""Devices and models: checked, placed, loaded."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from numpy.typing import NDArray
from safetensors import SafetensorError
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import get_device_name

from st_reba.compare.cost import AGREED, agreement, cosines, fastest_on_cpu, pairwise_cosines, sampled
from st_reba.data.demo import demo_sentences
from st_reba.encode import Encoder
from st_reba.files import is_full
from st_reba.hub.saved_files import check_saved
from st_reba.modules import CausalModule

from ..checks import check_model
from ..common import STAND_IN, Dtype
from ..printing import notes
from .stand_in import stand_in

Loaded = TypeVar("Loaded", bound=torch.nn.Module)


def check_devices(device: str | None) -> None:
    """See that PyTorch can put something on a device, or on several with commas between.

    Raises:
        ValueError: If it cannot, with what it says.
    """
    names = [] if device is None else [part.strip() for part in device.split(",")]
    if len({name.partition(":")[0] for name in names}) > 1:
        # What runs on several refuses different kinds, in words of its own.
        return
    for name in names:
        try:
            # What a device computes comes back; "meta" takes everything and computes nothing.
            torch.zeros(1, device=name, dtype=torch.float32).item()
        # Each backend refuses with an error of another type.
        except Exception as error:
            raise ValueError(
                f"--device {name}: PyTorch {torch.__version__} cannot use it here ({_first_line(error)}). Give cpu, or "
                f"one that is there; without --device it is {get_device_name()}."
            ) from error


#: What says that a model did not come from the Hub.
_HUB_ERRORS = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled)


@contextmanager
def usable(model: str, device: str | None = None) -> Iterator[None]:
    """Check model and devices; if the model then does not come from the Hub, say so by its name.

    Raises:
        ValueError: As :func:`check_model`, :func:`check_devices` and :func:`st_reba.hub.saved_files.check_saved`; or if
            the model's weights cannot be read.
        OSError: If the Hub does not give the model.
    """
    check_devices(device)
    check_model(model)
    check_saved(Path(model))
    try:
        yield
    except OSError as error:
        said = error.__cause__ or error.__context__ or error
        if Path(model).is_dir() or not isinstance(said, _HUB_ERRORS):
            raise
        raise OSError(
            f"The model {model}: there is no such directory, and it cannot be had from the Hub "
            f"({_first_line(said)}). Check the name, or give a directory."
        ) from error
    except SafetensorError as error:
        if is_full(error):
            raise
        raise ValueError(
            f"The model {model}: its weights are damaged or cut short ({_first_line(error)}). Fetch or save it again."
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def placement(device: str | None, dtype: Dtype) -> tuple[str, Dtype]:
    """Where to run and in which precision, when that is left to us."""
    device = device or get_device_name()
    if dtype is Dtype.fastest:
        dtype = Dtype(str(fastest_on_cpu()).removeprefix("torch.")) if device == "cpu" else Dtype.auto
    return device, Dtype.float32 if dtype is Dtype.auto and device == "cpu" else dtype


def load(
    module_class: type[CausalModule],
    model: str,
    max_seq_length: int | None,
    dtype: Dtype,
    **settings: object,
) -> CausalModule:
    if model == STAND_IN:
        model = str(stand_in())
    with usable(model):
        module = module_class(model, model_kwargs={"dtype": dtype.value}, **settings)  # type: ignore[arg-type]
    if max_seq_length is not None:
        module.max_seq_length = max_seq_length
    return module


def load_fastest(
    module_class: type[CausalModule],
    model: str,
    max_seq_length: int | None,
    dtype: Dtype,
    device: str | None,
    texts: Sequence[str],
    **settings: object,
) -> CausalModule:
    """A language model to be run, by the rule of :func:`sound`, looked at on some of the texts."""
    sample = sampled(texts)
    where, _ = placement(device, dtype)

    def loaded(precision: Dtype) -> CausalModule:
        return load(module_class, model, max_seq_length, precision, **settings).to(where)

    def on_sample(backbone: CausalModule) -> NDArray[np.float32]:
        return cosines(backbone, sample)

    chosen, backbone = sound(loaded, on_sample, where, dtype)
    return backbone or loaded(chosen)


def encoder_fastest(encoder: Encoder, device: str, dtype: Dtype) -> tuple[Encoder, SentenceTransformer | None]:
    """A saved model in the precision of the same rule, looked at on sentences of the package: an index and what is
    searched in it later are of one precision, whatever their texts.

    Returns:
        How it is loaded, and it itself if it had to be loaded for this.
    """
    sample = sampled(demo_sentences())

    def loaded(precision: Dtype) -> SentenceTransformer:
        return replace(encoder, dtype=precision.value).pinned().load(device)

    def on_sample(model: SentenceTransformer) -> NDArray[np.float32]:
        return pairwise_cosines(model.encode(sample, convert_to_tensor=True, show_progress_bar=False))

    chosen, model = sound(loaded, on_sample, device, dtype)
    return replace(encoder, dtype=chosen.value), model


def sound(
    load: Callable[[Dtype], Loaded], cosines: Callable[[Loaded], NDArray[np.float32]], device: str, dtype: Dtype
) -> tuple[Dtype, Loaded | None]:
    """The one rule of all commands that run a model: bfloat16 where that is the fastest, if it says the same.

    Args:
        load: Loads in a precision.
        cosines: Of what is loaded: bfloat16 is sound if it puts them in the order of float32.
        device: Where it runs.
        dtype: As asked for; all but ``fastest`` is taken as it is.

    Returns:
        The precision, and what was loaded in it; None if nothing had to be.
    """
    _, chosen = placement(device, dtype)
    if dtype is not Dtype.fastest or chosen is not Dtype.bfloat16:
        return chosen, None
    # One after the other: memory may have no room for both.
    wanted = cosines(load(Dtype.float32))
    gc.collect()
    loaded = load(Dtype.bfloat16)
    alike = agreement(wanted, cosines(loaded))
    told = f"the cosines of some texts are in the order of those of float32 up to {alike:.3f}"
    if alike >= AGREED:
        notes.print(f"In bfloat16, which this processor is fastest in: {told}. --dtype overrides this.", soft_wrap=True)
        return Dtype.bfloat16, loaded
    notes.print(f"In float32, as bfloat16 does not agree: {told}, and {AGREED} is asked for.", soft_wrap=True)
    return Dtype.float32, None
