"""Slot codecs: what they cost, what they lose, and that a store reads what it wrote."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from c2kv_core.errors import InputError
from c2kv_core.spec import CompressorSpec
from c2kv_core.store import CODECS, KVStore, LayerShape, as_stored
from tests.core_store_kit import GEOMETRY, assert_same, get_one, make_document, make_identity, new_store


def reference(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Quantisation written down one row at a time."""
    rows = x.transpose(dim, -1)
    out = torch.zeros_like(rows)
    for place in torch.cartesian_prod(*[torch.arange(n) for n in rows.shape[:-1]]):
        row = rows[tuple(place)]
        scale = max(float(row.abs().max()) / 127, 1e-30)
        out[tuple(place)] = torch.tensor([round(float(v) / scale) * scale for v in row])
    return out.transpose(dim, -1)


@pytest.mark.parametrize("tokens", [1, 4, 18])
def test_int8_has_a_scale_a_channel_of_keys_and_a_slot_of_values(tokens: int) -> None:
    part = make_document("a", part_tokens=(tokens,)).parts[0]
    got, _ = as_stored(part, "int8")
    assert (got.keys - reference(part.keys, 2)).abs().max() < 1e-5
    assert (got.values - reference(part.values, 3)).abs().max() < 1e-5


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    exponent=st.integers(-30, 30),
    tokens=st.integers(0, 40),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_int8_errs_by_half_a_step_at_most(seed: int, exponent: int, tokens: int, dtype: str) -> None:
    identity = make_identity(slot_dtype=dtype)
    part = make_document("a", part_tokens=(tokens,), identity=identity, seed=seed).parts[0]
    scale = torch.tensor(2.0**exponent, dtype=part.keys.dtype)
    scaled = type(part)(
        keys=part.keys * scale,
        values=part.values * scale,
        slot_positions=part.slot_positions,
        num_tokens=part.num_tokens,
        ratio=part.ratio,
    )
    got, size = as_stored(scaled, "int8")
    assert got.keys.dtype == part.keys.dtype and got.keys.shape == part.keys.shape
    layer = LayerShape(kv_heads=GEOMETRY.kv_heads, slots=part.num_slots, head_dim=GEOMETRY.head_dim)
    assert size == GEOMETRY.layers * CODECS["int8"].layer_bytes(layer, part.keys.dtype)
    if not part.num_slots:
        return
    # rounding to the slot dtype comes on top
    slack = 0.5 + (0.6 if dtype == "bfloat16" else 1e-3)
    for before, after, dim in ((scaled.keys, got.keys, 2), (scaled.values, got.values, 3)):
        step = before.float().abs().amax(dim=dim, keepdim=True) / 127
        assert ((after.float() - before.float()).abs() <= slack * step).all()


@pytest.mark.parametrize("value", [0.0, 3e38, 1e-40])
def test_int8_of_extreme_values_is_finite(value: float) -> None:
    part = make_document("a").parts[0]
    flat = type(part)(
        keys=torch.full_like(part.keys, value),
        values=torch.full_like(part.values, -value),
        slot_positions=part.slot_positions,
        num_tokens=part.num_tokens,
        ratio=part.ratio,
    )
    got, _ = as_stored(flat, "int8")
    assert torch.isfinite(got.keys).all() and torch.isfinite(got.values).all()
    assert torch.allclose(got.keys, flat.keys, rtol=0.01, atol=1e-37)


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("part_tokens", [(18,), (0,), (0, 5, 130)])
def test_a_store_gives_back_what_the_codec_keeps(
    tmp_path: Path, codec: str, dtype: str, part_tokens: tuple[int, ...]
) -> None:
    identity = make_identity(quantisation=codec, slot_dtype=dtype)
    store = new_store(tmp_path, identity=identity)
    document = make_document("a", part_tokens=part_tokens, identity=identity)
    store.put([document])
    kept = type(document)(
        namespace=document.namespace,
        doc_id=document.doc_id,
        content_hash=document.content_hash,
        title=document.title,
        parts=tuple(as_stored(part, codec)[0] for part in document.parts),
    )
    assert_same(get_one(store, "a"), kept)
    assert store.verify().ok


def test_codecs_lie_side_by_side(tmp_path: Path) -> None:
    plain, small = make_identity(), make_identity(quantisation="int8")
    document = make_document("a", part_tokens=(400,))
    for identity in (plain, small):
        new_store(tmp_path, identity=identity).put([document])
    rows = {row.fingerprint: row.length for row in KVStore.open(tmp_path / "store").rows()}
    assert len(rows) == 2
    assert rows[small.fingerprint] < 0.5 * rows[plain.fingerprint]
    found = new_store(tmp_path, identity=make_identity(quantisation="int8", ratio=8)).get(
        ["a"], namespace="acme"
    )
    assert "ratio differs" in str(found["a"])


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(InputError, match="expected quantisation none or int8, got 'int3'"):
        CompressorSpec(quantisation="int3")
