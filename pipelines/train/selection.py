"""The start of ``selection``: which tokens heads look back at while the model repeats a document.

A document is read, then said again by the base; how much of a head's attention a token gets at most is what the token
is worth to the head (KVzip, arXiv 2505.23416). A linear map from the token's normed state to the logarithm of that is
fitted in closed form, so that extraction needs no second reading and this part no training. With ``selection: heads``
how many of the document's most wanted tokens are a head's says also how many slots it is worth.

Shape legend: N tokens of a document, T tokens of its repetition, L layers, D hidden, K kv heads, G query heads a kv
head, H head dim.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor
from transformers import PreTrainedModel

from c2kv_core import hf_adapter
from c2kv_core.cache import AppendCache
from c2kv_core.errors import InputError
from c2kv_core.head_slots import FRACTIONS
from c2kv_core.text import ChatRenderer, document_parts
from pipelines.train.folder import RunFolder
from pipelines.train.setup import TrainingSetup
from pipelines.train.world import World

FITTED = "selection.safetensors"
"""The fitted maps of a run, beside its checkpoints."""
PROMPT = "Repeat the text above exactly."
SINK_TOKENS = 4
"""At the start of a document; their states are of another size and would decide the fit."""
RIDGE = 1e-2
"""Of the mean square of the states."""
FLOOR = 1e-6
"""Least attention that is told apart."""


def start_selection(setup: TrainingSetup, world: World, folder: RunFolder) -> None:
    """Give a fresh sidecar its fitted maps, the same on every worker; one that goes on has them already.

    Raises:
        InputError: the data have no document that is long enough.
        TrainingError: the run folder cannot be written.
    """
    config = setup.config
    if not setup.unfitted or config.control:
        return
    known = folder.storage.exists(FITTED) if world.leads else False
    if world.broadcast(int(known)):
        found = load(bytes(folder.storage.get(FITTED)))
        # Runs of before heads had shares fitted none, and need none.
        equal = torch.tensor(FRACTIONS).expand(*found["weights"].shape[:2], -1)
        fitted = FittedSelection(weights=found["weights"], shares=found.get("shares", equal))
    else:
        # Every worker computes: of a base that is spread over them, each has a part.
        fitted = fit_selection(setup.model, setup.preparer.renderer, fitting_documents(setup))
        for tensor in (fitted.weights, fitted.shares):
            if not world.leads:
                tensor.zero_()
            world.sum(tensor)
        if world.leads:
            with folder.writing():
                tensors = {"weights": fitted.weights.cpu(), "shares": fitted.shares.cpu()}
                folder.storage.put(FITTED, save(tensors))
    tensors = setup.sidecar.state_dict()
    for index, (weights, shares) in enumerate(zip(fitted.weights, fitted.shares, strict=True)):
        for name, value in (("weight", weights), ("shares", shares)):
            if (full := f"layers.{index}.scores.{name}") in setup.unfitted:
                tensors[full].copy_(value)


def fitting_documents(setup: TrainingSetup) -> list[list[int]]:
    """Token ids of documents drawn by the seed, evenly from all data files; of long ones the first part."""
    config, random = setup.config, np.random.default_rng([setup.config.seed, 6])
    drawn = []
    for place in range(config.selection_documents):
        pool = setup.files[place % len(setup.files)].rows.pool
        document = pool[int(random.integers(len(pool)))]
        try:
            parts = document_parts(
                setup.preparer.renderer, document.title, document.text, max_part_tokens=config.max_part_tokens
            )
        except InputError:
            # Its title leaves no room; rows with it are replaced as well.
            continue
        drawn.append(parts[0])
    return drawn


class FittedSelection(NamedTuple):
    """What repetitions say of heads."""

    weights: Tensor
    """(L, K, D) float32 linear maps whose values order the tokens of a document as ``repetition_scores`` does."""
    shares: Tensor
    """(L, K, P) float32, as ``head_slots`` takes them: of all tokens of all heads the fraction with the most attention
    is kept, and a head's share is how much of its tokens that is, a mean over documents."""


@torch.no_grad()
def fit_selection(
    model: PreTrainedModel, renderer: ChatRenderer, documents: Iterable[Sequence[int]]
) -> FittedSelection:
    """Fit maps and shares.

    Ridge regression on states and logarithms centred in each document, as its tokens are compared with each other.

    Args:
        model: the frozen base.
        renderer: of its chat template.
        documents: token ids; those of fewer than two after the sink are passed over.

    Raises:
        InputError: all are.
    """
    prompt = renderer.question_ids([{"role": "user", "content": PROMPT}])
    normal: list[Tensor] = []
    shares: list[Tensor] = []
    for ids in documents:
        if len(ids) < SINK_TOKENS + 2:
            continue
        states, wanted = repetition_scores(model, prompt, ids)
        for layer, (x_ND, y_KN) in enumerate(zip(states, wanted, strict=True)):
            x, y = (_centred(z[SINK_TOKENS:]) for z in (x_ND, (y_KN + FLOOR).log().T))
            products = torch.cat([x.T @ x, x.T @ y], dim=1)
            if layer == len(normal):
                normal.append(torch.zeros_like(products))
            normal[layer] += products
        shares.append(_shares(torch.stack(wanted)))
    if not normal:
        raise InputError(
            f"expected documents of {SINK_TOKENS + 2} tokens or more to fit the selection to, got none"
        )
    return FittedSelection(
        weights=torch.stack([_solved(products) for products in normal]),
        shares=torch.stack(shares).mean(dim=0).float().contiguous(),
    )


def _shares(wanted_LKN: Tensor) -> Tensor:
    """(L, K, P) of one document."""
    descending = wanted_LKN.flatten().sort(descending=True).values
    found = []
    for fraction in FRACTIONS:
        last = descending[max(int(fraction * len(descending)), 1) - 1]
        found.append((wanted_LKN >= last).double().mean(dim=2))
    return torch.stack(found, dim=-1)


def repetition_scores(
    model: PreTrainedModel, prompt: Sequence[int], ids: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """For each layer the tokens' normed states (N, D), and (K, N) the most attention that a repetition pays to each.

    The maximum is over the query heads of a kv head and over the tokens of the repetition, not of the prompt.
    """
    past, device = len(ids), model.device
    said_1T = torch.tensor([[*prompt, *ids]], device=device)
    tokens = said_1T.shape[1]
    positions = torch.arange(past, past + tokens, device=device)[None]
    angles = hf_adapter.rotation(model, positions)
    mask_TS = torch.ones(tokens, past + tokens, dtype=torch.bool, device=device).tril(past)
    own = torch.arange(past, device=device)[None]
    own_angles = hf_adapter.rotation(model, own)
    read = hf_adapter.embed(model, torch.tensor([list(ids)], device=device))
    said = hf_adapter.embed(model, said_1T)
    states, scores = [], []
    # A layer's entries: the document's, then those of its repetition, which sees both.
    cache = AppendCache(None)
    for index, layer in enumerate(hf_adapter.decoder_layers(model)):
        states.append(hf_adapter.inside(layer, layer.input_layernorm, read)[0].double())
        queries_1QTH = hf_adapter.rotate(hf_adapter.inside(layer, partial(_queries, layer), said), angles)
        read = hf_adapter.run_layer(layer, read, positions=own, angles=own_angles, cache=cache, mask=None)
        said = hf_adapter.run_layer(
            layer, said, positions=positions, angles=angles, cache=cache, mask=mask_TS[None, None]
        )
        queries_QTH = queries_1QTH[0, :, len(prompt) :] * hf_adapter.attention_scale(layer.self_attn)
        scores.append(
            _most_attention(queries_QTH, cache.frozen().keys[index][0], mask_TS[len(prompt) :], past).double()
        )
    return states, scores


def _queries(layer: hf_adapter.StockLayer, hidden: Tensor) -> Tensor:
    projected: Tensor = layer.self_attn.q_proj(layer.input_layernorm(hidden))
    return hf_adapter.project_heads(layer.self_attn, "q", projected)


def _most_attention(q_QTH: Tensor, k_KSH: Tensor, mask_TS: Tensor, past: int) -> Tensor:
    """(K, N) over the query heads of each kv head and all T."""
    kv_heads, _, dim = k_KSH.shape
    group = q_QTH.shape[0] // kv_heads
    scores = (q_QTH.reshape(kv_heads, -1, dim) @ k_KSH.transpose(-1, -2)).float()
    weights = scores.masked_fill(~mask_TS.repeat(group, 1), float("-inf")).softmax(dim=-1)
    most: Tensor = weights[:, :, :past].amax(dim=1)
    return most


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(dim=0, keepdim=True)


def _solved(products: Tensor) -> Tensor:
    """(K, D) from [XᵀX | XᵀY]."""
    size = products.shape[0]
    square, target = products[:, :size], products[:, size:]
    damped = square + RIDGE * square.diagonal().mean() * torch.eye(
        size, dtype=square.dtype, device=square.device
    )
    solution: Tensor = torch.linalg.solve(damped, target)
    return solution.T.float().contiguous()
