"""Where a language model's attention ends: the output projection of each layer.

It is ``o_proj``, ``c_proj``, ``dense`` or ``out_proj``, among other names; what it is, is found by a dry run.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from .anatomy import Anatomy
from .hooks import Places


def output_projections(model: PreTrainedModel) -> Places:
    """The output projection of each layer that has attention.

    What it is given are the values of all heads, weighted and side by side; what it gives, the layer adds to its
    residual stream.

    Returns:
        Where they are, by the index of the layer.

    Raises:
        ValueError: If the model has no attention, or does not project it with a module of its own.
    """
    name = type(model).__name__
    anatomy = Anatomy(model)
    attending = anatomy.attention_layers
    if not attending:
        raise ValueError(f"{name} has no attention whose values could be read. Use a model with attention layers.")
    for index in attending:
        if index not in anatomy.output_projections:
            raise ValueError(
                f"The output projection of the attention in layer {index} of {name} was not found. Use an architecture "
                "that has it as a module, such as Llama, Qwen or GPT-2."
            )
    return Places(model, {index: model.get_submodule(anatomy.output_projections[index]) for index in attending})
