"""What trains: gradients reach the sidecar alone, through slots and composition, and are the oracle's."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from c2kv_core import hf_adapter
from c2kv_core.cache import AppendCache
from c2kv_core.compose import compose, prefill, token_states
from c2kv_core.extractor import Extractor, _token_states
from c2kv_core.sidecar import Sidecar
from c2kv_core.sidecar_config import SidecarConfig
from tests import oracle
from tests.oracle import assert_near
from tests.tiny_models import documents, new_tiny_model, random_sidecar, token_ids

RATIO = 4
SYSTEM, QUESTION = token_ids(3, seed=9), token_ids(5, seed=50)
# Float32 sums in another order: gradients are sums over many products.
TOLERANCE = 1e-4


def trainable(rank: int | None = None) -> tuple[PreTrainedModel, Sidecar]:
    model = new_tiny_model("qwen2", "yarn")
    return model, random_sidecar(model, SidecarConfig(ratios=(RATIO,), rank=rank))


def gradients(loss: Tensor, sidecar: Sidecar) -> dict[str, Tensor | None]:
    parameters = dict(sidecar.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return dict(zip(parameters, found, strict=True))


def assert_gradients(
    got: dict[str, Tensor | None], wanted: dict[str, Tensor | None], last_layer: int
) -> None:
    # A shift of all keys alike changes no attention, so key biases hardly count: they are compared on one scale.
    scale = max(float(g.abs().max()) for g in wanted.values() if g is not None)
    for name, expected in wanted.items():
        ours = got[name]
        # In the last layer slots are only stored, they attend no more.
        unused = name.startswith(f"layers.{last_layer}.q_proj")
        assert (ours is None) == (expected is None) == unused, name
        if ours is not None and expected is not None:
            assert float((ours - expected).abs().max()) <= TOLERANCE * scale, name


def weighed(keys: Tensor, values: Tensor) -> Tensor:
    weights = torch.randn(keys.shape, generator=torch.Generator().manual_seed(5))
    return (keys * weights).sum() + (values * weights.flip(0)).sum()


@pytest.mark.parametrize("rank", [None, 2])
def test_gradients_of_slots_are_the_oracles(rank: int | None) -> None:
    model, sidecar = trainable(rank)
    ids = token_ids(13)
    states = Extractor(model, sidecar).states([ids], (RATIO,))[0]
    got = gradients(weighed(states.keys[:, 0], states.values[:, 0]), sidecar)
    joint = oracle.extract(model, sidecar, ids, RATIO)
    assert_gradients(got, gradients(weighed(joint.keys, joint.values), sidecar), len(model.model.layers) - 1)


def question_loss(logits: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(QUESTION[1:]))


def composed_loss(model: PreTrainedModel, sidecar: Sidecar, sources: list[list[int]]) -> Tensor:
    states = Extractor(model, sidecar).states(sources, (RATIO,))[0]
    context = compose(model, prefill(model, SYSTEM), states.documents())
    hidden = token_states(
        model,
        torch.tensor([QUESTION]),
        AppendCache(context.cache),
        start=context.next_position,
    )
    return question_loss(hf_adapter.logits(model, hidden)[0])


def test_gradients_through_composition_are_the_oracles() -> None:
    model, sidecar = trainable()
    sources = documents([9, 6])
    loss = composed_loss(model, sidecar, sources)
    with torch.no_grad():
        _, entries = oracle.read(model, [], SYSTEM, 0)
    slots, cursor = oracle.slot_entries(
        [oracle.extract(model, sidecar, ids, RATIO) for ids in sources], len(SYSTEM)
    )
    wanted = question_loss(oracle.read(model, [*entries, *slots], QUESTION, cursor)[0])
    assert_near(loss, wanted)
    assert_gradients(gradients(loss, sidecar), gradients(wanted, sidecar), len(model.model.layers) - 1)


def test_the_base_gets_no_gradient_and_does_not_move() -> None:
    model, sidecar = trainable()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimiser = torch.optim.SGD(sidecar.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        optimiser.zero_grad()
        loss = composed_loss(model, sidecar, documents([9, 6]))
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_token_keys_and_values_carry_no_gradient() -> None:
    model, sidecar = trainable()
    # not even where somebody forgot to freeze the base
    model.requires_grad_(True)
    read = list(_token_states(model, torch.tensor([token_ids(6)]), last=True))
    assert not any(x.requires_grad for layer in read for x in layer)
    tool = Extractor(model, sidecar)
    assert tool.states([token_ids(6)], (RATIO,))[0].keys.requires_grad
    assert not tool.extract([token_ids(6)], RATIO)[0].keys.requires_grad
