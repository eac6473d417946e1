"""Texts to encode, and an encoder that computes nothing."""

from __future__ import annotations

import random

import numpy as np
import torch

from st_reba.encode import Encoder


class Ones(Encoder):
    """Loads nothing and computes nothing."""

    def load(self, device):
        return [torch.nn.Identity()]

    def encode(self, model, texts):
        return np.ones((len(texts), 2), np.float32)


def sentences(count: int, seed: int = 0) -> list[str]:
    """Texts of several lengths."""
    random.seed(seed)
    words = ["river", "bank", "我爱", "the quick", "Zwölf", "mouse", "🥊", "money"]
    return [f"{number} " + " ".join(random.choices(words, k=random.randint(0, 9))) for number in range(count)]
