"""What ``st-reba export`` does: a function for each kind of model that it writes."""

from __future__ import annotations

from pathlib import Path

from st_reba.encode import Encoder
from st_reba.export import save_plain, static_model
from st_reba.files import atomic_directory
from st_reba.modules import CausalTransformer

from ..common import Dtype
from ..printing import Shown, console
from .given import texts_to_fit
from .models import load_fastest, usable


def run(
    *,
    model: str,
    static: Path | None,
    plain: Path | None,
    pieces: bool,
    layer: int | None,
    dimensions: int | None,
    fit_texts: str | None,
    dtype: Dtype,
    device: str | None,
) -> None:
    """Write the one kind that is asked for."""
    if static is not None:
        _static(model, static, layer, dimensions, fit_texts, device, dtype)
    if plain is not None:
        _plain(model, plain, pieces, device)


def _static(
    model: str,
    out: Path,
    layer: int | None,
    dimensions: int | None,
    fit_texts: str | None,
    device: str | None,
    dtype: Dtype,
) -> None:
    """A table of the vocabulary's vectors."""
    texts = texts_to_fit(fit_texts)
    hint = ", sentences inside the package: give --fit-texts with some hundreds like your own"
    console.print(
        f"Fitting weights and whitening on {len(texts)} texts{hint if fit_texts is None else ''}.", soft_wrap=True
    )
    with atomic_directory(out, "--static") as scratch:
        module = load_fastest(CausalTransformer, model, None, dtype, device, texts)
        with Shown() as progress:
            task = progress.add_task("Reading the vocabulary", total=None, unit="tokens")
            made = static_model(
                module,
                texts,
                layer=layer,
                dimension=dimensions,
                on_progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
        made.save_pretrained(str(scratch))
    console.print(
        f'Wrote {out}. Load it with: SentenceTransformer("{out}"); it needs sentence-transformers alone.',
        soft_wrap=True,
    )


def _plain(model: str, out: Path, pieces: bool, device: str | None) -> None:
    """The same vectors for inference engines."""
    with usable(model, device):
        # In the precision of its weights, which is what is written.
        loaded = Encoder(model).pinned().load(device or "cpu")
    with atomic_directory(out, "--plain") as scratch:
        save_plain(loaded, scratch, pieces=pieces)
    console.print(
        f"Wrote {out}, which gives the same vectors. Serve it with any engine that has "
        f'{type(loaded[0].model).__name__}, or load it with: SentenceTransformer("{out}"); it needs '
        "sentence-transformers alone.",
        soft_wrap=True,
    )
