"""One sentence for a model that is not to be had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

#: What says that a model did not come from the Hub.
_HUB_ERRORS = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled)


@contextmanager
def fetching(model: str) -> Iterator[None]:
    """Raise what libraries raise of a model that does not come from the Hub as one sentence.

    Raises:
        OSError: If it does not.
    """
    try:
        yield
    except OSError as error:
        cause = error.__cause__ or error.__context__ or error
        if Path(model).is_dir() or not isinstance(cause, _HUB_ERRORS):
            raise
        missing = f"The model {model}: there is no such directory"
        if isinstance(cause, HFValidationError):
            raise OSError(f"{missing}. Check the path, or give a Hub id (org/name).") from None
        why = "HF_HUB_OFFLINE is set, and it is not among what was fetched before"
        if not is_offline_mode():
            why = (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
        raise OSError(
            f"{missing}, and it cannot be had from the Hub ({why}). Check the name, or give a directory."
        ) from None
