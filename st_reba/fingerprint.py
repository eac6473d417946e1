"""What tells one loaded language model from another."""

from __future__ import annotations

import hashlib
import json

import torch

from .modules import CausalModule
from .version import __version__


def fingerprint(module: CausalModule) -> str:
    """Tells this language model, as it would embed, from any other: 16 hexadecimal digits.

    Weights (a sample of each), configuration, precision, ``max_seq_length`` and the package's version go into it. It
    keeps results of one model from being taken for those of another.
    """
    config = {key: value for key, value in module.model.config.to_dict().items() if key not in _NOT_THE_MODEL}
    settings = [__version__, module.max_seq_length, config]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, parameter in module.model.named_parameters():
        values = parameter.detach().flatten()[:: max(1, parameter.numel() // 64)].cpu().contiguous()
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype")
