"""Naive implementations of the papers' algorithms: one text at a time, eager attention, all attention maps stored.

They share no code with the package. A text is a list of token ids; ``before`` and ``after`` are the special tokens
around it, which belong to no copy.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch


@contextlib.contextmanager
def masked(model, layers, change):
    """Apply a function to the mask of these layers of an eager model within the block."""

    def replace(module, args, kwargs):
        return args, {**kwargs, "attention_mask": change(kwargs["attention_mask"])}

    parts = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
    found = [module for module in parts if module.layer_idx in layers]
    assert len(found) == len(layers)
    hooks = [layer.register_forward_pre_hook(replace, with_kwargs=True) for layer in found]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def both_ways(model, count):
    """Make the last ``count`` layers of an eager model bidirectional within the block (BeLLM).

    A sliding window is mirrored to the other side.
    """

    def opened(mask):
        visible = (mask == 0) | (mask == 0).mT
        full = bool((mask == 0).all(dim=(0, 1))[-1].all())
        hidden = torch.zeros_like(visible) if full else ~visible
        return torch.zeros_like(mask).masked_fill(hidden, float("-inf"))

    depth = model.config.num_hidden_layers
    with masked(model, range(depth - count, depth), opened) as layers:
        # GPT-2 has a second causal mask of its own in older versions of transformers, a buffer named bias.
        second = [(layer, layer.bias) for layer in layers if isinstance(getattr(layer, "bias", None), torch.Tensor)]
        for layer, mask in second:
            layer.bias = torch.ones_like(mask)
        try:
            yield
        finally:
            for layer, mask in second:
                layer.bias = mask


def sink_hidden(model, layers):
    """Hide the first token from all later tokens in these layers of an eager model (no sink)."""

    def hidden(mask):
        mask = mask.clone()
        mask[:, :, 1:, 0] = float("-inf")
        return mask

    return masked(model, layers, hidden)


def run(model, ids):
    """Return the last hidden states (N, D) and the attention maps (layers, heads, N, N) of one sequence.

    The maps exclude the first column of layers with a re-routed key.
    """
    output = model(input_ids=torch.tensor([ids]), output_attentions=True)
    return output.last_hidden_state[0], [weights[0, ..., -len(ids) :] for weights in output.attentions]


def refined_thought(model, ids, passes):
    """Return the states (n + 1, D) after full forward passes over text + EOS, the last of ``ids`` (Refined Thought)."""
    embed = model.get_input_embeddings()
    text, eos = embed(torch.tensor([ids[:-1]])), embed(torch.tensor([[ids[-1]]]))
    memory = None
    for _ in range(passes):
        parts = [text, eos] if memory is None else [text, memory, eos]
        output = model(inputs_embeds=torch.cat(parts, dim=1), output_attentions=True)
        states = output.last_hidden_state[0]
        weights = output.attentions[-1][0, :, -1, -len(states) :].mean(dim=0)
        memory = sum(weight * state for weight, state in zip(weights, states, strict=True))[None, None]
    return torch.cat([states[: text.shape[1]], states[-1:]])


def algorithm_1(maps):
    """Symmetrize each map (Eq. 4) and fuse all maps with the maximum rule (Eq. 5): ReBA, Algorithm 1."""
    fused = torch.zeros_like(maps[0][0])
    for layer in maps:
        for attention in layer:
            symmetric = (attention + attention.T) / 2
            fused = (fused + symmetric) / 2 + (fused - symmetric).abs() / 2
    return fused


def algorithm_2(model, ids, k, before=(), after=(), layers=None, normalize=False):
    """Return the word embeddings e_1 .. e_n (n, D) of a text repeated k times (Eq. 6): ReBA, Algorithm 2."""
    n, start = len(ids), len(before)
    states, maps = run(model, [*before, *(ids * k), *after])
    if layers is not None:
        maps = [maps[layer] for layer in layers]
    weights = algorithm_1(maps)[start : start + k * n, start : start + k * n]
    states = states[start : start + k * n]
    rows = []
    for i in range(n):
        row = weights[i, i:]
        if normalize:
            row = row / row.sum()
        rows.append(row @ states[i:])
    return torch.stack(rows)


def echo(model, ids, k, before=(), after=()):
    """Return the states of the last copy (Echo-k, Table 1)."""
    n, start = len(ids), len(before)
    states, _ = run(model, [*before, *(ids * k), *after])
    return states[start + (k - 1) * n : start + k * n]


#: Where the architectures of the tests keep a layer, and in it the output projection of its attention.
LAYERS = {
    "gpt2": ("h.{}", "attn.c_proj"),
    "gpt_neox": ("layers.{}", "attention.dense"),
    "opt": ("decoder.layers.{}", "self_attn.out_proj"),
    "falcon": ("h.{}", "self_attention.dense"),
    "bloom": ("h.{}", "self_attention.dense"),
    "gpt_j": ("h.{}", "attn.out_proj"),
    "gpt_neo": ("h.{}", "attn.attention.out_proj"),
    "mpt": ("blocks.{}", "attn.out_proj"),
}


NORMS = {"gpt2": "ln_f", "gpt_neox": "final_layer_norm", "opt": "decoder.final_layer_norm", "falcon": "ln_f",
         "bloom": "ln_f", "gpt_j": "ln_f", "gpt_neo": "ln_f", "mpt": "norm_f"}  # fmt: skip


def final_norm(architecture, model):
    return model.get_submodule(NORMS.get(architecture, "norm"))


def after_each_layer(model, architecture, ids):
    """Return the states (n, D) after 0, 1, ... layers, with the final norm."""
    norm = final_norm(architecture, model)
    with torch.inference_mode():
        *states, last = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
        return [*(norm(each)[0] for each in states), last[0]]


def layer_name(architecture, layer):
    return LAYERS.get(architecture, ("layers.{}", ""))[0].format(layer)


def projection_name(architecture, layer):
    return f"{layer_name(architecture, layer)}.{LAYERS.get(architecture, ('', 'self_attn.o_proj'))[1]}"


@contextlib.contextmanager
def changed(model, name, before=None, after=None):
    """Apply a function to the first input, or to the output, of a module of a plain model within the block."""

    def change_input(module, args, kwargs):
        if args:
            return (before(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: before(kwargs[first])}

    module = model.get_submodule(name)
    hooks = []
    if before is not None:
        hooks.append(module.register_forward_pre_hook(change_input, with_kwargs=True))
    if after is not None:
        hooks.append(module.register_forward_hook(lambda module, args, output: after(output)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def seen(model, name, ids, where):
    """Return the input (``"before"``) or output (``"after"``) of a module for one sequence: (N, ...)."""
    found = []

    def note(states):
        # Some layers give more than their states, which come first.
        found.append((states[0] if isinstance(states, tuple) else states)[0].clone())
        return states

    with changed(model, name, **{where: note}):
        model(input_ids=torch.tensor([ids]))
    return found[-1]


def value_aggregation(model, architecture, ids, layers):
    """Return the last token's attention output after the output projection, averaged over layers: (D,) (AlignedWVA)."""
    outputs = [seen(model, projection_name(architecture, layer), ids, "after")[-1] for layer in layers]
    return sum(outputs) / len(outputs)


def shortened(model, layers):
    """Return a copy of a Llama-like model with its first layers and the final norm."""
    model = copy.deepcopy(model)
    model.layers = model.layers[:layers]
    model.config.num_hidden_layers = layers
    return model


def layer_states(model, architecture, ids):
    """Return the last token's state after each layer, (L, D): the outputs of the blocks, without the final norm."""
    names = [layer_name(architecture, layer) for layer in range(model.config.num_hidden_layers)]
    return torch.stack([seen(model, name, ids, "after")[-1] for name in names])


def reconstruction_error(autoencoder, states):
    """Return the mean squared error (L,) of each layer's decoded states, against the normalized states (B, L, D)."""
    wanted = torch.nn.functional.layer_norm(states, states.shape[-1:])
    layers = zip(autoencoder.encoder, autoencoder.decoder, states.unbind(1), wanted.unbind(1), strict=True)
    return torch.stack([(decoder(encoder(own)) - each).square().mean() for encoder, decoder, own, each in layers])


# JTCSE: the layers of BERT and RoBERTa, one text at a time.


def twin_tower(first, second, ids, every):
    """Run both towers and their cross-attention streams, layer by layer.

    Returns the last hidden states of each tower (N, D), those of the streams (None without cross layers), the pooler
    outputs (D,), and for each tower the context tensors of all layers (N, D).
    """
    # Without dropout, whether or not they are in training.
    towers = [copy.deepcopy(model).eval() for model in (first, second)]
    width = first.config.hidden_size // first.config.num_attention_heads

    def heads(states):
        return states.unflatten(-1, (-1, width)).transpose(0, 1)

    def joined(context):
        return context.transpose(0, 1).flatten(1)

    def rest(layer, context, residual):
        """Apply Add & Norm, feed forward, Add & Norm."""
        attended = layer.attention.output(context, residual)
        return layer.output(layer.intermediate(attended), attended)

    states = [tower.embeddings(torch.tensor([ids]))[0] for tower in towers]
    streams: list[Any] = [None, None]
    contexts: list[list[Any]] = [[], []]
    for number, layers in enumerate(zip(*(tower.encoder.layer for tower in towers), strict=True), 1):
        own = [layer.attention.self for layer in layers]
        # Equation 8, of each head; and the values that it weighs, (heads, N, width).
        scores = [heads(part.query(h)) @ heads(part.key(h)).mT for part, h in zip(own, states, strict=True)]
        maps = [(each / width**0.5).softmax(-1) for each in scores]
        values = [heads(part.value(h)) for part, h in zip(own, states, strict=True)]
        if every and number % every == 0:
            for tower in (0, 1):
                # Equation 10.
                residual = states[tower] if streams[tower] is None else streams[tower]
                streams[tower] = rest(layers[tower], joined(maps[tower] @ values[1 - tower]), residual)
        for tower in (0, 1):
            # Equation 9.
            contexts[tower].append(joined(maps[tower] @ values[tower]))
        states = [rest(layers[tower], contexts[tower][-1], states[tower]) for tower in (0, 1)]
    pooled = [tower.pooler(own[None])[0] for tower, own in zip(towers, states, strict=True)]
    return states, None if streams[0] is None else streams, pooled, contexts
