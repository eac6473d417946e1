"""Devices and models: checked, placed, loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors import SafetensorError
from sentence_transformers.util import get_device_name
from transformers.utils import logging as transformers_logging

# Makes our modules known, which `import st_reba` leaves to be done here in the command's process.
from st_reba import public as public
from st_reba.compare.precision import AGREED, agreement, cosines, sampled
from st_reba.files import is_full
from st_reba.hub.saved_files import check_saved
from st_reba.lm.precision import fastest_on_cpu
from st_reba.lm.stand_in import stand_in
from st_reba.modules import CausalModule, CausalTransformer

from ..common import STAND_IN, Dtype, check_model, notes


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
    transformers_logging.disable_progress_bar()
    if model == STAND_IN:
        model = str(stand_in())
    with usable(model):
        module = module_class(model, model_kwargs={"dtype": dtype.value}, **settings)  # type: ignore[arg-type]
    if max_seq_length is not None:
        module.max_seq_length = max_seq_length
    return module


def load_fastest(
    model: str, max_seq_length: int | None, dtype: Dtype, device: str | None, texts: Sequence[str]
) -> CausalModule:
    """A model to be run: where bfloat16 would be the fastest, in that if on some of the texts it says the same."""
    fastest = dtype is Dtype.fastest
    device, dtype = placement(device, dtype)
    if not fastest or dtype is not Dtype.bfloat16:
        return load(CausalTransformer, model, max_seq_length, dtype).to(device)
    sample = sampled(texts)
    # One after the other: memory may have no room for both.
    wanted = cosines(load(CausalTransformer, model, max_seq_length, Dtype.float32).to(device), sample)
    gc.collect()
    backbone = load(CausalTransformer, model, max_seq_length, Dtype.bfloat16).to(device)
    alike = agreement(wanted, cosines(backbone, sample))
    told = f"the cosines of {len(sample)} of the texts are in the order of those of float32 up to {alike:.3f}"
    if alike >= AGREED:
        notes.print(f"In bfloat16: {told}.", soft_wrap=True)
        return backbone
    notes.print(f"In float32, as bfloat16 does not agree: {told}, and {AGREED} is asked for.", soft_wrap=True)
    del backbone
    return load(CausalTransformer, model, max_seq_length, Dtype.float32).to(device)
