"""Several processes that train one model, as ``accelerate launch`` starts them."""

from __future__ import annotations

from ..optional import require


def is_main() -> bool:
    """Whether this is the one process that writes and tells; a process alone is."""
    return bool(require("accelerate", "train", "Training").PartialState().is_main_process)


def wait() -> None:
    """Until all of them are here."""
    require("accelerate", "train", "Training").PartialState().wait_for_everyone()
