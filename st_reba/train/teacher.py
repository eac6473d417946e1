"""What a frozen teacher says of texts: embedded once, kept on the disk, and turned into what a student can reach."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.nn.functional import normalize

from ..files import atomic_file, remove_scratch
from ..modules.moments import principal_directions

#: Texts that are kept as one file.
_CHUNK = 1024
#: Of which ridge regression takes the best.
_SHRINKAGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)


def kept_vectors(
    make: Callable[[], SentenceTransformer],
    key: object,
    texts: Sequence[str],
    directory: Path,
    *,
    batch_size: int = 32,
    on_texts: Callable[[int], None] = lambda count: None,
) -> Tensor:
    """A teacher's embeddings of texts, each made once, whatever is distilled from them later.

    Args:
        make: Makes the teacher, if there is a text that it has not embedded yet.
        key: What tells the teacher from any other, by its ``repr``.
        texts: n of them.
        directory: Where the embeddings are kept, in files that are there whole or not at all. Their names tell teacher
            and texts, so that those of several lie side by side.
        batch_size: Texts at a time.
        on_texts: Called with the number of texts whenever some are there.

    Returns:
        (n, D), float32, on the CPU.
    """
    directory.mkdir(parents=True, exist_ok=True)
    remove_scratch(directory)
    teacher: SentenceTransformer | None = None
    found = []
    for start in range(0, len(texts), _CHUNK):
        chunk = list(texts[start : start + _CHUNK])
        name = hashlib.sha256(repr((key, chunk)).encode("utf-8", "surrogatepass")).hexdigest()[:24]
        path = directory / f"{name}.safetensors"
        if not path.is_file():
            teacher = make() if teacher is None else teacher
            vectors = teacher.encode(chunk, batch_size=batch_size, convert_to_tensor=True, show_progress_bar=False)
            with atomic_file(path) as stream:
                stream.write(save({"vectors": vectors.float().cpu().contiguous()}))
        found.append(load_file(path)["vectors"])
        on_texts(len(chunk))
    return torch.cat(found)


def directions(vectors: Tensor, dimension: int) -> Tensor:
    """(dimension, D): those in which vectors (n, D) are longest, so that of their dot products most is left."""
    wide = vectors.double()
    _, rows = principal_directions(wide.mT @ wide)
    return rows[:dimension].float()


def targets(vectors: Tensor, rows: Tensor) -> Tensor:
    """(n, k): vectors (n, D) along k directions, of length 1; a zero vector stays one."""
    return normalize(vectors @ rows.mT, dim=-1)


def linear_map(inputs: Tensor, outputs: Tensor) -> nn.Linear:
    r"""The linear map from one embedding to another that ridge regression finds.

    .. math:: W = \arg\min_W \frac{1}{n} \sum_i \Bigl\lVert W \frac{x_i - \mu}{\sigma} - (y_i - \bar y) \Bigr\rVert^2
        + \lambda \lVert W \rVert^2

    with each dimension's mean and deviation; :math:`\lambda` is the best of some on a tenth of the texts.

    Args:
        inputs: (n, d).
        outputs: (n, k).
    """
    x, y = inputs.double(), outputs.double()
    mean, scale = x.mean(dim=0), x.std(dim=0, correction=0)
    # What hardly varies says nothing, and dropout would move it far. Where texts are fewer than dimensions, those in
    # which a whitened table does not vary hold the rounding of float32, some 1e-6 of the others.
    typical = scale.square().mean().sqrt()
    constant = scale <= torch.maximum(1e-6 * mean.abs(), 1e-5 * typical)
    inverse = scale.reciprocal().masked_fill(constant, 0)
    z = (x - mean) * inverse
    seen = max(1, len(z) - len(z) // 10)
    found = {}
    for shrinkage, weight in zip(_SHRINKAGES, _ridge(z[:seen], y[:seen], _SHRINKAGES), strict=True):
        error = (z[seen:] @ weight + y[:seen].mean(dim=0) - y[seen:]).square().sum()
        found[shrinkage] = float(error)
    [weight] = _ridge(z, y, [min(found, key=found.__getitem__)])
    linear = nn.Linear(x.shape[1], y.shape[1])
    with torch.no_grad():
        linear.weight.copy_((inverse[:, None] * weight).mT)
        linear.bias.copy_(y.mean(dim=0) - mean @ (inverse[:, None] * weight))
    return linear


def _ridge(z: Tensor, y: Tensor, shrinkages: Sequence[float]) -> list[Tensor]:
    """(d, k) for each: of centred inputs with variance 1."""
    values, vectors = torch.linalg.eigh(z.mT @ z / len(z))
    projected = vectors.mT @ (z.mT @ (y - y.mean(dim=0)) / len(z))
    return [vectors @ (projected / (values.clamp(min=0) + shrinkage)[:, None]) for shrinkage in shrinkages]
