"""The papers' algorithms, written out naively: one text at a time, eager attention, every map stored.

Nothing here is shared with the package. A text is a list of token ids; ``before`` and ``after`` are the ids a tokenizer
puts around it, which belong to no copy.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections import Counter
from typing import Any

import numpy as np
import scipy.stats
import torch


@contextlib.contextmanager
def both_ways(model, count):
    """BeLLM: in the last ``count`` layers of an eager model, replace the causal mask by one that hides nothing.

    A sliding window is opened to the other side.
    """
    last = model.config.num_hidden_layers - count

    def replace(module, args, kwargs):
        mask = kwargs["attention_mask"]
        visible = (mask == 0) | (mask == 0).mT
        full = bool((mask == 0).all(dim=(0, 1))[-1].all())
        hidden = torch.zeros_like(visible) if full else ~visible
        return args, {**kwargs, "attention_mask": torch.zeros_like(mask).masked_fill(hidden, float("-inf"))}

    layers = [
        module for module in model.modules() if type(module).__name__.endswith("Attention") and module.layer_idx >= last
    ]
    assert len(layers) == count
    hooks = [layer.register_forward_pre_hook(replace, with_kwargs=True) for layer in layers]
    # GPT-2 has a second causal mask of its own in older versions of transformers, a buffer named bias.
    second = [(layer, layer.bias) for layer in layers if isinstance(getattr(layer, "bias", None), torch.Tensor)]
    for layer, mask in second:
        layer.bias = torch.ones_like(mask)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer, mask in second:
            layer.bias = mask


@contextlib.contextmanager
def sink_hidden(model, layers):
    """No sink: in these layers of an eager model, every row of the mask but the first hides the first token."""

    def replace(module, args, kwargs):
        mask = kwargs["attention_mask"].clone()
        mask[:, :, 1:, 0] = float("-inf")
        return args, {**kwargs, "attention_mask": mask}

    found = [
        module for module in model.modules()
        if type(module).__name__.endswith("Attention") and module.layer_idx in layers
    ]  # fmt: skip
    assert len(found) == len(layers)
    hooks = [layer.register_forward_pre_hook(replace, with_kwargs=True) for layer in found]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def run(model, ids):
    """Last hidden states (N, D) and the attention maps of every layer, (layers, heads, N, N), of one sequence.

    What attention goes to a re-routed key, the first column, is no part of the maps.
    """
    output = model(input_ids=torch.tensor([ids]), output_attentions=True)
    return output.last_hidden_state[0], [weights[0, ..., -len(ids) :] for weights in output.attentions]


def refined_thought(model, ids, passes):
    """RT: ``passes`` whole forward passes over text + EOS (the last of ``ids``). States of the last one, (n + 1, D)."""
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
    """ReBA, Algorithm 1: symmetrise each map (Eq. 4) and fuse them all with the maximum rule (Eq. 5)."""
    fused = torch.zeros_like(maps[0][0])
    for layer in maps:
        for attention in layer:
            symmetric = (attention + attention.T) / 2
            fused = (fused + symmetric) / 2 + (fused - symmetric).abs() / 2
    return fused


def algorithm_2(model, ids, k, before=(), after=(), layers=None, normalize=False):
    """ReBA, Algorithm 2: the word embeddings e_1 .. e_n (n, D) of a text repeated k times (Eq. 6)."""
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
    """Echo-k (Table 1): the states of the last copy."""
    n, start = len(ids), len(before)
    states, _ = run(model, [*before, *(ids * k), *after])
    return states[start + (k - 1) * n : start + k * n]


def meta_eol(model, prompts):
    """MetaEOL: the last token's state of each prompt, (P, D); ``prompts`` are the ids of whole inputs."""
    return torch.stack([run(model, ids)[0][-1] for ids in prompts])


@contextlib.contextmanager
def rerouted(model, layers, bias=0.0):
    """KV-Embedding: in these layers of an eager model, K~ = [k_n; K] and V~ = [v_n; V], written out.

    The architecture's own eager attention is given the longer keys and values, and its mask one more column.
    """
    attention = next(module for module in model.modules() if hasattr(module, "layer_idx"))
    code: Any = sys.modules[type(attention).__module__]
    original = code.eager_attention_forward

    def eager_attention_forward(module, query, key, value, attention_mask, *args, **kwargs):
        if module.layer_idx in layers:
            key = torch.cat([key[:, :, -1:], key], dim=2)
            value = torch.cat([value[:, :, -1:], value], dim=2)
            column = torch.full_like(attention_mask[..., :1], bias)
            attention_mask = torch.cat([column, attention_mask], dim=-1)
        return original(module, query, key, value, attention_mask, *args, **kwargs)

    code.eager_attention_forward = eager_attention_forward
    try:
        yield
    finally:
        code.eager_attention_forward = original


def filtered(head, vectors, low, high):
    """EmbedFilter: coordinates in the right singular vectors low .. high - 1 of the head (V, D), up to their signs."""
    _, _, directions = np.linalg.svd(np.asarray(head, dtype=np.float64), full_matrices=False)
    return np.asarray(vectors, dtype=np.float64) @ directions[low:high].T


def whitened(fitted_on, vectors, k, shrinkage=0.0):
    """Su et al. (2021), Algorithm 1: (x - mu) W with W = (U sqrt(Lambda^-1))[:, :k], up to signs.

    With shrinkage, Lambda + shrinkage * mean(Lambda) stands in Lambda's place.
    """
    fitted_on, vectors = np.asarray(fitted_on, dtype=np.float64), np.asarray(vectors, dtype=np.float64)
    u, variances, _ = np.linalg.svd(np.atleast_2d(np.cov(fitted_on.T, bias=True)))
    return (vectors - fitted_on.mean(axis=0)) @ (u @ np.diag((variances + shrinkage * variances.mean()) ** -0.5))[:, :k]


def partwise_whitened(fitted_on, vectors, shares, shrinkage):
    """Each part less its mean, over its deviations, times U (Lambda + shrinkage * mean(Lambda) I)^-1/2 of its
    correlations, with a length of the root of its share; up to signs within a part."""
    parts = []
    for own, new, share in zip(*(np.split(np.asarray(given, dtype=np.float64), len(shares), axis=1)
                                 for given in (fitted_on, vectors)), shares, strict=True):  # fmt: skip
        mean, deviation = own.mean(axis=0), own.std(axis=0)
        u, variances, _ = np.linalg.svd(np.atleast_2d(np.corrcoef(own.T)))
        mapped = (new - mean) / deviation @ u @ np.diag((variances + shrinkage * variances.mean()) ** -0.5)
        parts.append(share**0.5 * mapped / np.linalg.norm(mapped, axis=1, keepdims=True))
    return np.concatenate(parts, axis=1)


def standardized_sum(fitted_on, vectors, shares):
    """The sum of s_p z_p / |z_p| with z_p the standardised part p."""
    found = 0
    for own, new, share in zip(*(np.split(np.asarray(given, dtype=np.float64), len(shares), axis=1)
                                 for given in (fitted_on, vectors)), shares, strict=True):  # fmt: skip
        standard = (new - own.mean(axis=0)) / own.std(axis=0)
        found = found + share * standard / np.linalg.norm(standard, axis=1, keepdims=True)
    return found


def partial_rank_correlation(x, y, z):
    """Pearson correlation of what least squares on the ranks of z, and a constant, leaves of those of x and of y."""
    x, y, z = (scipy.stats.rankdata(values) for values in (x, y, z))
    design = np.stack([np.ones_like(z), z], axis=1)
    left = [ranks - design @ np.linalg.lstsq(design, ranks, rcond=None)[0] for ranks in (x, y)]
    return np.corrcoef(*left)[0, 1]


def idf_weighted_mean(fitted_on, ids, vectors):
    """sum_i idf(w_i) v_i / sum_i idf(w_i) with idf = ln((1 + N) / (1 + df)) + 1, texts as lists of token ids."""
    df = Counter(token for text in fitted_on for token in set(text))
    weights = [math.log((1 + len(fitted_on)) / (1 + df[token])) + 1 for token in ids]
    return np.average(np.asarray(vectors, dtype=np.float64), axis=0, weights=weights)


def without_the_top(fitted_on, vectors, d):
    """All-but-the-top: minus the mean, minus the parts in the first d principal components."""
    fitted_on, vectors = np.asarray(fitted_on, dtype=np.float64), np.asarray(vectors, dtype=np.float64)
    mean = fitted_on.mean(axis=0)
    _, _, components = np.linalg.svd(fitted_on - mean)
    centred = vectors - mean
    return centred - sum(np.outer(centred @ component, component) for component in components[:d])


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


def after_each_layer(model, architecture, ids, normed=True):
    """States after no layer, after one, ... (n, D each): behind the final norm, or as the layers leave them."""
    norm, seen = final_norm(architecture, model), []
    hook = norm.register_forward_pre_hook(lambda norm, args: seen.append(args[0]))
    with torch.inference_mode():
        *states, last = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
        hook.remove()
        return [norm(each)[0] if normed else each[0] for each in states] + [(last if normed else seen[0])[0]]


def layer_name(architecture, layer):
    return LAYERS.get(architecture, ("layers.{}", ""))[0].format(layer)


def projection_name(architecture, layer):
    return f"{layer_name(architecture, layer)}.{LAYERS.get(architecture, ('', 'self_attn.o_proj'))[1]}"


@contextlib.contextmanager
def changed(model, name, before=None, after=None):
    """A module of a plain model whose first input, or output, is changed by a function of it."""

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
    """What a module of a plain model is given (``"before"``) or gives (``"after"``) for one sequence: (N, ...)."""
    found = []

    def note(states):
        # Some layers give more than their states, which come first.
        found.append((states[0] if isinstance(states, tuple) else states)[0].clone())
        return states

    with changed(model, name, **{where: note}):
        model(input_ids=torch.tensor([ids]))
    return found[-1]


def value_aggregation(model, architecture, ids, layers):
    """AlignedWVA: the last token's attention output behind the output projection, averaged over layers: (D,)."""
    outputs = [seen(model, projection_name(architecture, layer), ids, "after")[-1] for layer in layers]
    return sum(outputs) / len(outputs)


def steered(model, architecture, auxiliary, layer, scale):
    """A block in which the last token of all that runs is steered away from that of ``auxiliary``."""
    name = projection_name(architecture, layer)
    irrelevant = seen(model, name, auxiliary, "before")[-1]

    def steer(states):
        value = states[0, -1]
        difference = value - irrelevant
        if difference.norm() < 1e-5 * value.norm():  # of what a short window holds, both prompts say the same
            difference = torch.zeros_like(difference)
            return torch.cat([states[:, :-1], difference[None, None]], dim=1)
        factor = value.norm() / difference.norm() if scale == "norm" else scale
        return torch.cat([states[:, :-1], (factor * difference)[None, None]], dim=1)

    return changed(model, name, before=steer)


def with_slot(model, vector):
    """A copy of a model with one more word, whose input embedding is ``vector``; and its id."""
    model = copy.deepcopy(model)
    table = model.get_input_embeddings().weight.detach()
    with torch.no_grad():
        model.resize_token_embeddings(len(table) + 1, mean_resizing=False)
        model.get_input_embeddings().weight[-1] = vector
    return model, len(table)


@contextlib.contextmanager
def prepended(model, architecture, slot, layers):
    """Token prepending: before layers 1 .. ``layers`` - 1, that of the token ``slot`` becomes the last one's."""
    places: list[int] = []

    def find(ids):
        # Refined thought embeds the last token on its own.
        places[:] = (ids[0] == slot).nonzero().flatten().tolist() or places
        return ids

    def renew(states):
        states = states.clone()
        states[0, places] = states[0, -1].clone()
        return states

    embeddings = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    with contextlib.ExitStack() as stack:
        stack.enter_context(changed(model, embeddings, before=find))
        for layer in range(1, layers):
            stack.enter_context(changed(model, layer_name(architecture, layer), before=renew))
        yield


def shortened(model, layers):
    """A copy of a Llama, or its like, that ends in its norm after so many layers."""
    model = copy.deepcopy(model)
    model.layers = model.layers[:layers]
    model.config.num_hidden_layers = layers
    return model


# BeLLM


def equation_6(anchors, positives, negatives, temperature):
    """BeLLM, Eq. 6: rows are h_i, h_i^+ and h_i^-; the sum over i, as it is written."""
    return len(anchors) * info_nce(anchors, [*positives, *negatives], temperature)


# FREEZE


def layer_states(model, ids):
    """The last token's state behind each layer of a model, (L, D): what each block puts out, before any final norm."""
    blocks = next(
        module
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == model.config.num_hidden_layers
    )
    states = []
    hooks = [block.register_forward_hook(lambda block, args, output: states.append(output)) for block in blocks]
    model(input_ids=torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    outputs = [state[0] if isinstance(state, tuple) else state for state in states]
    return torch.stack([output.view(1, len(ids), -1)[0, -1] for output in outputs])


def freeze_embedding(autoencoder, states):
    """One text's embedding from its states (L, D): the encodings, each of length 1, one after another."""
    parts = []
    layers = autoencoder.layers or range(1, len(states) + 1)
    for place, layer in enumerate(layers):
        state = states[layer - 1]
        if autoencoder.encoders:
            norm, linear, _ = autoencoder.encoder[place]
            deviation = ((state - state.mean()) ** 2).mean().add(norm.eps).sqrt()
            state = (state - state.mean()) / deviation * norm.weight + norm.bias
            state = torch.tanh(linear.weight @ state + linear.bias)
        parts.append(state / (state @ state).sqrt())
    return torch.cat(parts) / len(layers) ** 0.5


def freeze_score(autoencoder, first, second):
    """The similarity of two texts from their states, (L, D) each: sigmoid(MLP(c) - log d)."""
    one, other = freeze_embedding(autoencoder, first), freeze_embedding(autoencoder, second)
    cosines, start = [], 0
    for width in autoencoder.widths:
        u, v = one[start : start + width], other[start : start + width]
        cosines.append(u @ v / (u @ u).sqrt() / (v @ v).sqrt())
        start += width
    distance = 1 - sum(cosines) / len(cosines)
    return torch.sigmoid(autoencoder.head.mlp(torch.stack(cosines))[0] - torch.log(distance))


def log_residual_variance(predictions, labels, epsilon):
    """FREEZE's loss: the log of the mean squared distance of the residuals from their mean."""
    residuals = [prediction - label for prediction, label in zip(predictions, labels, strict=True)]
    mean = sum(residuals) / len(residuals)
    variance = sum((residual - mean) ** 2 for residual in residuals) / len(residuals)
    return torch.log(variance + epsilon)


def reconstruction_error(autoencoder, states):
    """(L,): the mean squared error of each layer's decoded states beside the states (B, L, D), normalised."""
    wanted = torch.nn.functional.layer_norm(states, states.shape[-1:])
    layers = zip(autoencoder.encoder, autoencoder.decoder, states.unbind(1), wanted.unbind(1), strict=True)
    return torch.stack([(decoder(encoder(own)) - each).square().mean() for encoder, decoder, own, each in layers])


# JTCSE: the layers of BERT and RoBERTa, one text at a time.


def twin_tower(first, second, ids, every):
    """Both towers and their cross-attention streams, layer by layer.

    Returns the last hidden states of each tower (N, D), the streams' (None without cross layers), the poolers' outputs
    (D,), and for each tower the context tensors of all layers (N, D).
    """
    # Without dropout, whether or not they are in training.
    towers = [copy.deepcopy(model).eval() for model in (first, second)]
    width = first.config.hidden_size // first.config.num_attention_heads

    def heads(states):
        return states.unflatten(-1, (-1, width)).transpose(0, 1)

    def joined(context):
        return context.transpose(0, 1).flatten(1)

    def rest(layer, context, residual):
        """Add & Norm, feed forward, Add & Norm."""
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


def cosine(first, second):
    return first @ second / (first.norm() * second.norm())


def info_nce(anchors, positives, temperature):
    """Eq. 11, a text at a time."""
    total = torch.zeros(())
    for i, anchor in enumerate(anchors):
        exponentials = [torch.exp(cosine(anchor, positive) / temperature) for positive in positives]
        total = total - torch.log(exponentials[i] / sum(exponentials))
    return total / len(anchors)


def tensor_modulus(own, other, own_pooled, other_pooled, least=1e-4):
    """Eq. 13, one way: ``own`` of one tower, ``other`` the positives of the other."""
    total = 0
    for h, h_plus, p, p_plus in zip(own, other, own_pooled, other_pooled, strict=True):
        coefficient = -torch.log(torch.clamp(cosine(h, h_plus), min=least))
        total = total + coefficient * (p - p_plus).norm() / (p.norm() + p_plus.norm())
    return total / len(own)


def jtcse(first, second, coin, temperature=0.05):
    """Eq. 15. ``first`` and ``second`` are views: (h, p, c), each a pair of towers' (B, D); coin is R."""
    (h, p, c), (h_plus, p_plus, c_plus) = first, second
    nce = sum(info_nce(h[tower], h_plus[tower], temperature) for tower in (0, 1))
    own, other = (0, 1) if coin == 1 else (1, 0)
    interaction = sum(info_nce(s[own], s_plus[other], temperature) for s, s_plus in ((h, h_plus), (c, c_plus)))
    modulus = tensor_modulus(h[0], h_plus[1], p[0], p_plus[1]) + tensor_modulus(h[1], h_plus[0], p[1], p_plus[0])
    return nce, interaction, modulus


def in_context_scores(model, front, separator, documents, asked, heads, apart=False):
    """In-context reranking (arXiv:2410.02642): the score of each document, from the stored maps of two whole prompts.

    ``asked`` are the tokens of the query, and of the query without content, each with which of them count; ``heads``
    the pairs of a layer and a head that count. With ``apart``, a document sees what stands before all documents and
    itself, from the same position on, and the query stands behind the longest.
    """
    paid = []
    for query, counts in asked:
        ids, positions, owners = [*front], [*range(len(front))], [-1] * len(front)
        for number, document in enumerate(documents):
            first = len(front) if apart else len(ids)
            positions += range(first, first + len(separator) + len(document))
            ids += [*separator, *document]
            owners += [number] * (len(separator) + len(document))
        behind = max(positions) + 1
        rows = [len(ids) + place for place, own in enumerate(counts) if own]
        ids, owners = [*ids, *query], [*owners, *[len(documents)] * len(query)]
        positions += range(behind, behind + len(query))
        given = {}
        if apart:
            size = len(ids)
            mask = torch.full((1, 1, size, size), torch.finfo(torch.float32).min)
            for token in range(size):
                for other in range(token + 1):
                    if owners[other] in (-1, owners[token]) or owners[token] == len(documents):
                        mask[0, 0, token, other] = 0
            given = {"attention_mask": mask, "position_ids": torch.tensor([positions])}
        maps = model(input_ids=torch.tensor([ids]), output_attentions=True, **given).attentions
        paid.append(sum(maps[layer][0, head, rows].mean(dim=0) for layer, head in heads))
    scores, reached = [], len(front)
    for document in documents:
        reached += len(separator)
        tokens = [float(paid[0][place] - paid[1][place]) for place in range(reached, reached + len(document))]
        reached += len(document)
        least = np.mean(tokens) - 2 * np.std(tokens, ddof=1) if len(tokens) > 1 else -math.inf
        scores.append(sum(token for token in tokens if token > least))
    return scores
