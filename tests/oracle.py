"""The method written down as slowly and plainly as possible: loops over tokens, slots and what each one sees.

Only the model's own submodules are used (projections, norms, MLP, rotary table): rotation, visibility, softmax and
positions are spelt out here, so that the real code is compared with something that shares none of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from c2kv_core.head_slots import head_slots
from c2kv_core.sidecar import Sidecar


@dataclass(frozen=True)
class OracleDocument:
    """What the oracle says about one document."""

    keys: Tensor
    """(L, K, M, H), before rotation."""
    values: Tensor
    """(L, K, M, H)."""
    slot_positions: list[int]
    token_states: Tensor
    """(L + 1, N, D): the input of every layer, then the output of the last."""
    token_keys: Tensor
    """(L, K, N, H), rotated."""
    token_values: Tensor
    """(L, K, N, H)."""
    num_tokens: int


@dataclass(frozen=True)
class Entry:
    """One key and value per layer, at a place of the context."""

    position: int
    keys: Tensor
    """(L, K, H), before rotation."""
    values: Tensor
    """(L, K, H)."""


def extract(
    model: PreTrainedModel, sidecar: Sidecar, ids: Sequence[int], ratio: int, overlap_tokens: int = 0
) -> OracleDocument:
    """Tokens and slots of one document, computed jointly: first all tokens, then all slots, in one sequence."""
    tokens = len(ids)
    slots = math.ceil(tokens / ratio)
    positions = list(range(tokens)) + [min((j + 1) * ratio, tokens) - 1 for j in range(slots)]
    seen = [list(range(i + 1)) for i in range(tokens)]
    for j in range(slots):
        sink = set(range(min(tokens, ratio)))
        own = set(range(max(j * ratio - overlap_tokens, 0), min((j + 1) * ratio, tokens)))
        earlier = {tokens + other for other in range(j + 1)}
        seen.append(sorted(sink | own | earlier))
    token_inputs = model.get_input_embeddings()(torch.tensor(ids))
    residual = sidecar.config.residual
    blocks = [range(j * ratio, min((j + 1) * ratio, tokens)) for j in range(slots)]
    last = [token_inputs[block[-1]] if residual == "embed_last" else 0.0 for block in blocks]
    hidden = [*token_inputs.unbind(0), *[sidecar.slot_embedding + x for x in last]]
    keys, values, rotated, states = [], [], [], [torch.stack(hidden[:tokens])]
    shared: list[tuple[Tensor, Tensor]] = []
    for index, layer in enumerate(model.model.layers):
        q, k, v = [], [], []
        best: list[list[int]] = []
        changes: list[dict[str, Tensor]] = []
        if sidecar.config.selection != "none":
            normed_tokens = [layer.input_layernorm(x) for x in hidden[:tokens]]
            weights = sidecar.layers[index]["scores"].weight
            exact = sidecar.config.selection == "topk"
            best = [_best_tokens(score, normed_tokens, slots, exact=exact) for score in weights]
        for place, x in enumerate(hidden):
            side = sidecar.layers[index] if place >= tokens else None
            normed = layer.input_layernorm(x)
            if residual == "embed_mean" and side is not None and index == 0:
                block = [layer.input_layernorm(token_inputs[i]) for i in blocks[place - tokens]]
                normed = normed + sum(block) / len(block)
            for name, made in (("q", q), ("k", k), ("v", v)):
                made.append(_project(layer, name, normed, side))
            if best and place >= tokens:
                changes.append({})
                for name, made in (("k", k), ("v", v)):
                    changed = made[-1] - _project(layer, name, normed, None)
                    changes[-1][name] = changed
                    kept = []
                    for head, ranked in enumerate(best):
                        token = ranked[place - tokens]
                        x = made[token][head]
                        kept.append(_moved(model, x, token - positions[place]) if name == "k" else x)
                    made[-1] = changed + torch.stack(kept)
        if sidecar.config.selection == "heads":
            counts = head_slots(sidecar.shares(), num_tokens=tokens, slots=slots)[index].tolist()
            kept = [
                _best_tokens(w, normed_tokens, count, exact=False)
                for w, count in zip(weights, counts, strict=True)
            ]
            _share_out(model, shared, kept, (k, v), changes, positions[tokens:], ratio)
        k_rotated = [rotate(model, x, position) for x, position in zip(k, positions, strict=True)]
        q_rotated = [rotate(model, x, position) for x, position in zip(q, positions, strict=True)]
        hidden = [
            _finish(
                layer,
                x,
                _attend(q_rotated[i], [k_rotated[s] for s in seen[i]], [v[s] for s in seen[i]]),
            )
            for i, x in enumerate(hidden)
        ]
        keys.append(torch.stack(k, dim=1))
        values.append(torch.stack(v, dim=1))
        rotated.append(torch.stack(k_rotated, dim=1))
        states.append(torch.stack(hidden[:tokens]))
    all_keys, all_values = torch.stack(keys), torch.stack(values)
    slot_keys, slot_values = all_keys[:, :, tokens:], all_values[:, :, tokens:]
    if shared:
        slot_keys, slot_values = (
            torch.stack([pair[part] for pair in shared]).view_as(slot_keys) for part in (0, 1)
        )
    return OracleDocument(
        keys=slot_keys,
        values=slot_values,
        slot_positions=positions[tokens:],
        token_states=torch.stack(states),
        token_keys=torch.stack(rotated)[:, :, :tokens],
        token_values=all_values[:, :, :tokens],
        num_tokens=tokens,
    )


def assert_near(got: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Equal within ``tolerance`` of the largest expected value."""
    assert got.shape == expected.shape
    got, expected = got.detach(), expected.detach()
    assert float((got - expected).abs().max()) <= tolerance * float(expected.abs().max())


def slot_entries(documents: Sequence[OracleDocument], cursor: int) -> tuple[list[Entry], int]:
    """Entries of documents placed one after another from ``cursor``, and where the last one ends."""
    entries = []
    for document in documents:
        for j, local in enumerate(document.slot_positions):
            entries.append(
                Entry(
                    position=cursor + local,
                    keys=document.keys[:, :, j],
                    values=document.values[:, :, j],
                )
            )
        cursor += document.num_tokens
    return entries, cursor


def read(
    model: PreTrainedModel, context: Sequence[Entry], ids: Sequence[int], start: int
) -> tuple[Tensor, list[Entry]]:
    """Logits (T, vocabulary) of ordinary tokens from position ``start`` on, and the entries they leave.

    Every token sees the whole context, the tokens before it and itself.
    """
    hidden = list(model.get_input_embeddings()(torch.tensor(ids)).unbind(0))
    made: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in hidden]
    for index, layer in enumerate(model.model.layers):
        keys = [rotate(model, entry.keys[index], entry.position) for entry in context]
        values = [entry.values[index] for entry in context]
        for i, x in enumerate(hidden):
            normed = layer.input_layernorm(x)
            q, k, v = (_project(layer, name, normed, None) for name in "qkv")
            made[i][0].append(k)
            made[i][1].append(v)
            keys.append(rotate(model, k, start + i))
            values.append(v)
            hidden[i] = _finish(layer, x, _attend(rotate(model, q, start + i), keys, values))
    logits = torch.stack([model.get_output_embeddings()(model.model.norm(x)) for x in hidden])
    entries = [
        Entry(position=start + i, keys=torch.stack(k), values=torch.stack(v)) for i, (k, v) in enumerate(made)
    ]
    return logits, entries


def greedy(
    model: PreTrainedModel, context: Sequence[Entry], question: Sequence[int], start: int, count: int
) -> list[int]:
    """Greedy answer; question and answer so far are read anew for every token."""
    answer: list[int] = []
    for _ in range(count):
        logits, _ = read(model, context, [*question, *answer], start)
        answer.append(int(logits[-1].argmax()))
    return answer


def _best_tokens(score: Tensor, states: list[Tensor], count: int, *, exact: bool) -> list[int]:
    """Places of the tokens that a head wants most (or to 1/4096), of equals the earlier, in their order."""
    wants = [float(score @ x) for x in states]
    if not exact:
        wants = [round(x * 4096) for x in wants]
    return sorted(sorted(range(len(states)), key=lambda i: -wants[i])[:count])


def _share_out(
    model: PreTrainedModel,
    shared: list[tuple[Tensor, Tensor]],
    kept: Sequence[Sequence[int]],
    tokens: tuple[list[Tensor], list[Tensor]],
    changes: Sequence[dict[str, Tensor]],
    slot_positions: Sequence[int],
    ratio: int,
) -> None:
    """Append the entries of a layer's heads: each kept token with what the slot of its block changes."""
    tokens_count = len(tokens[0]) - len(slot_positions)
    for head, places in enumerate(kept):
        for index, token in enumerate(places):
            stand = int((index + 0.5) * tokens_count / len(places) + 1e-9)
            change, block_end = changes[token // ratio], slot_positions[token // ratio]
            key = _moved(model, tokens[0][token][head], token - stand)
            key = key + _moved(model, change["k"][head], block_end - stand)
            shared.append((key, tokens[1][token][head] + change["v"][head]))


def _moved(model: PreTrainedModel, key: Tensor, by: int) -> Tensor:
    """(H,) a key that is turned by a number of positions, without the attention scaling that some RoPEs put on it."""
    scale = rotate(model, torch.ones_like(key)[None], 0)[0, 0]
    return rotate(model, key[None], by)[0] / scale


def _project(layer: Any, name: str, normed: Tensor, side: Any) -> Tensor:
    """(heads, H) query, key or value of one token (``side`` None) or slot, after the base's own norm."""
    attention = layer.self_attn
    base = getattr(attention, f"{name}_proj")
    if side is None:
        flat = base(normed)
    else:
        own = side[f"{name}_proj"]
        if hasattr(own, "down"):
            flat = base(normed) + own.up @ (own.down @ normed)
        else:
            flat = own.weight @ normed + (own.bias if own.bias is not None else 0.0)
    heads = flat.view(-1, attention.head_dim)
    norm = getattr(attention, f"{name}_norm", None)
    return norm(heads) if norm is not None else heads


def rotate(model: PreTrainedModel, x: Tensor, position: int) -> Tensor:
    """RoPE of (heads, H) at one position: the pair (i, i + H/2) turns by the angle of i."""
    cos, sin = model.model.rotary_emb(x, position_ids=torch.tensor([[position]]))
    cos, sin = cos[0, 0], sin[0, 0]
    half = x.shape[-1] // 2
    first, second = x[:, :half], x[:, half:]
    return torch.cat(
        [first * cos[:half] - second * sin[:half], second * cos[half:] + first * sin[half:]], dim=-1
    )


def _attend(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """(Q*H,) of one query over the keys it sees, head by head."""
    group = q.shape[0] // keys[0].shape[0]
    all_keys, all_values = torch.stack(list(keys)), torch.stack(list(values))
    out = []
    for head in range(q.shape[0]):
        scores = all_keys[:, head // group] @ q[head] / math.sqrt(q.shape[1])
        weights = (scores - scores.max()).exp()
        out.append((weights / weights.sum()) @ all_values[:, head // group])
    return torch.cat(out)


def _finish(layer: Any, x: Tensor, attended: Tensor) -> Tensor:
    x = x + layer.self_attn.o_proj(attended)
    return x + layer.mlp(layer.post_attention_layernorm(x))
