"""Slots that start from tokens that each head chooses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from c2kv_core import compose, generate, hf_adapter
from c2kv_core.errors import SidecarError
from c2kv_core.extractor import Extractor
from c2kv_core.sidecar import Sidecar
from c2kv_core.sidecar_config import SidecarConfig
from c2kv_core.slot_selection import ranked_tokens, selected_tokens
from pipelines.eval.methods.reuse import token_documents
from tests.core_identity import IDENTITY
from tests.oracle import assert_near
from tests.tiny_models import ARCHITECTURES, ROPES, documents, random_sidecar, tiny_model, token_ids


@pytest.mark.parametrize("rope", sorted(ROPES))
def test_unrotate_undoes_rotate(rope: str) -> None:
    model = tiny_model("llama", rope)
    angles = hf_adapter.rotation(model, torch.tensor([[0, 1, 7, 500, 4095]]))
    x = torch.randn(1, 2, 5, 8)
    assert_near(hf_adapter.unrotate(hf_adapter.rotate(x, angles), angles), x)


def test_the_tokens_of_the_highest_scores_are_kept_by_place_the_earlier_of_equals() -> None:
    # What stands behind the second document's four tokens is padding, however high it scores.
    scores = torch.tensor([[3.0, 1, 2, 0, 5, 5, 9], [1, 1, 1, 1, 7, 0, 0]])[..., None]
    ranked = ranked_tokens(scores, torch.tensor([7, 4]))
    chosen = selected_tokens(ranked, torch.tensor([3, 2]), slots=3)
    assert chosen[0, 0].tolist() == [4, 5, 6]
    assert chosen[1, 0, :2].tolist() == [0, 1]
    assert int(chosen.max()) < 7, "what padded slots are given can be gathered"


def test_padding_takes_part_in_no_choice() -> None:
    model = tiny_model()
    tool = Extractor(model, random_sidecar(model, SidecarConfig(ratios=(3,), rank=3, selection="topk")))
    ids = documents([7, 31, 4, 18])
    (padded,) = tool.states(ids, (3,))
    for together, one in zip(padded.documents(), ids, strict=True):
        assert_near(together.keys, tool.extract([one], 3)[0].keys)


@pytest.mark.parametrize("rope", sorted(ROPES))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_at_ratio_one_untrained_slots_are_the_tokens(architecture: str, rope: str) -> None:
    model = tiny_model(architecture, rope)
    config = SidecarConfig(ratios=(1, 4), selection="topk", residual="embed_last")
    tool = Extractor(model, Sidecar.from_base(model, config))
    ids = documents([9, 14])
    slots, tokens = tool.extract(ids, 1), token_documents(model, ids)
    for got, wanted in zip(slots, tokens, strict=True):
        assert_near(got.keys, wanted.keys)
        assert_near(got.values, wanted.values)
    # Nothing is scored yet, so at a higher ratio the first tokens are kept.
    for got, wanted in zip(tool.extract(ids, 4), tokens, strict=True):
        assert_near(got.values, wanted.values[:, :, : got.num_slots])
    question = token_ids(5, seed=9)
    answers = [
        list(generate(model, compose(model, None, d), question, max_new_tokens=8)) for d in (slots, tokens)
    ]
    assert answers[0] == answers[1]


def test_scores_take_part_in_no_gradient_and_projections_do() -> None:
    model = tiny_model()
    sidecar = random_sidecar(model, SidecarConfig(ratios=(4,), rank=3, selection="topk"))
    (states,) = Extractor(model, sidecar).states(documents([13]), (4,))
    (states.keys.sum() + states.values.sum()).backward()
    for layer in sidecar.layers:
        assert layer["scores"].weight.grad is None
        assert float(layer["v_proj"].up.grad.abs().sum()) > 0


def test_a_saved_sidecar_comes_back_with_its_scores(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    sidecar = random_sidecar(model, SidecarConfig(ratios=(4,), rank=3, selection="topk"))
    sidecar.save(tmp_path / "saved")
    loaded = Sidecar.load(tmp_path / "saved")
    assert loaded.digest() == sidecar.digest()
    ids = documents([13])
    assert torch.equal(
        Extractor(model, loaded).extract(ids, 4)[0].keys, Extractor(model, sidecar).extract(ids, 4)[0].keys
    )
    header = tmp_path / "saved" / "sidecar.json"
    told = json.loads(header.read_text())
    told["config"]["selection"] = "none"
    header.write_text(json.dumps(told))
    with pytest.raises(
        SidecarError, match=r"expected no layers\.0\.scores\.weight, as selection is none in its header"
    ):
        Sidecar.load(tmp_path / "saved")


def test_the_scores_shape_is_checked_against_the_base() -> None:
    model, other = tiny_model("llama"), tiny_model("qwen2")
    sidecar = random_sidecar(model, SidecarConfig(ratios=(4,), selection="topk"))
    with pytest.raises(SidecarError):
        Extractor(other, sidecar)


def test_an_unknown_selection_is_refused() -> None:
    with pytest.raises(SidecarError, match="expected selection none or topk or heads, got 'best'"):
        SidecarConfig(selection="best")


def test_what_is_stored_without_selection_keeps_its_fingerprint() -> None:
    plain = IDENTITY
    assert "selection" not in plain.canonical_json
    selecting = replace(plain, selection="topk")
    assert '"selection":"topk"' in selecting.canonical_json
    assert selecting.fingerprint != plain.fingerprint
    assert selecting.differing_fields(plain) == ["selection"]
    assert type(plain).from_json(plain.canonical_json) == plain
    assert type(plain).from_json(selecting.canonical_json) == selecting
