"""The map that selects tokens: fitted to what the stock model attends to, once a run, the same on every worker."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from c2kv_core import Sidecar
from c2kv_core.errors import InputError, SidecarError
from c2kv_core.head_slots import FRACTIONS
from c2kv_core.text import ChatRenderer
from pipelines.train.folder import RunFolder
from pipelines.train.progress import Progress
from pipelines.train.run import train
from pipelines.train.selection import (
    FITTED,
    FLOOR,
    PROMPT,
    RIDGE,
    SINK_TOKENS,
    fit_selection,
    repetition_scores,
)
from tests.oracle import assert_near
from tests.pipelines_train_kit import losses, tiny_model_dir, train_config
from tests.tiny_models import ARCHITECTURES, documents, new_tiny_model, tiny_tokenizer, token_ids


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tokens_worth_is_the_most_attention_that_the_stock_model_pays_it(architecture: str) -> None:
    model, stock = (new_tiny_model(architecture, "yarn") for _ in range(2))
    stock.set_attn_implementation("eager")
    ids, prompt = token_ids(11), token_ids(4, seed=3)
    with torch.no_grad():
        states, scores = repetition_scores(model, prompt, ids)
        whole = torch.tensor([[*ids, *prompt, *ids]])
        told = stock(whole, output_attentions=True, output_hidden_states=True)
    heads = model.config.num_key_value_heads
    for index, layer in enumerate(model.model.layers):
        attended_QNN = told.attentions[index][0, :, -len(ids) :, : len(ids)]
        wanted = attended_QNN.unflatten(0, (heads, -1)).amax(dim=(1, 2))
        assert_near(scores[index].float(), wanted)
        own = layer.input_layernorm(told.hidden_states[index][0, : len(ids)])
        assert_near(states[index].float(), own)


def test_the_fit_is_the_ridge_regression_of_all_documents_together() -> None:
    model, renderer = new_tiny_model(), ChatRenderer(tiny_tokenizer())
    # The last has nothing to compare behind the sink, and takes no part.
    ids = [*documents([37, 60, 29]), token_ids(SINK_TOKENS + 1)]
    fitted = fit_selection(model, renderer, ids).weights
    prompt = renderer.question_ids([{"role": "user", "content": PROMPT}])
    inputs: list[Tensor] = []
    targets: list[Tensor] = []
    for one in ids[:3]:
        with torch.no_grad():
            states, scores = repetition_scores(model, prompt, one)
        x, y = states[1][SINK_TOKENS:], (scores[1][:, SINK_TOKENS:].T + FLOOR).log()
        inputs.append(x - x.mean(dim=0))
        targets.append(y - y.mean(dim=0))
    x, y = torch.cat(inputs), torch.cat(targets)
    size = x.shape[1]
    damping = (RIDGE * x.square().sum() / size).sqrt() * torch.eye(size, dtype=x.dtype)
    wanted = torch.linalg.lstsq(
        torch.cat([x, damping]), torch.cat([y, torch.zeros(size, y.shape[1], dtype=y.dtype)])
    ).solution
    assert_near(fitted[1], wanted.T.float(), 1e-4)
    with pytest.raises(InputError, match="documents of 6 tokens or more"):
        fit_selection(model, renderer, ids[3:])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("selection", ["topk", "heads"])
def test_a_run_fits_once_keeps_the_map_and_exports_it(
    tmp_path: Path, model_dir: Path, selection: str
) -> None:
    settings = {"selection": selection, "residual": "embed_last", "rank": 4, "weight_decay": 0.5}
    whole = train_config(tmp_path, model_dir, run="whole", **settings)
    train(whole)
    fitted = load_file(Path(RunFolder(whole).location) / FITTED)
    assert float(fitted["weights"].abs().min(dim=-1).values.max()) > 0
    sidecar = Sidecar.load(Path(RunFolder(whole).location) / "sidecar")
    assert sidecar.config.selection == selection
    for index, layer in enumerate(sidecar.layers):
        assert torch.equal(layer["scores"].weight, fitted["weights"][index].to(torch.bfloat16))
        if selection == "heads":
            assert torch.equal(layer["scores"].shares, fitted["shares"][index].to(torch.bfloat16))

    cut = train_config(tmp_path, model_dir, run="cut", **settings)
    stopped = RuntimeError("stopped")

    def stop(progress: Progress) -> None:
        if progress.step == 3:
            raise stopped

    with pytest.raises(RuntimeError, match="stopped"):
        train(cut, progress=stop)
    file = Path(RunFolder(cut).location) / FITTED
    written = file.stat().st_mtime_ns
    train(cut)
    assert file.stat().st_mtime_ns == written
    assert losses(cut) == losses(whole)
    if selection == "topk":
        # As runs of before heads could share slots out left it.
        old = train_config(tmp_path, model_dir, run="old", **settings)
        with pytest.raises(RuntimeError, match="stopped"):
            train(old, progress=stop)
        save_file({"weights": fitted["weights"]}, Path(RunFolder(old).location) / FITTED)
        train(old)
        assert losses(old) == losses(whole)

    other = {**settings, "selection": "none", "init_sidecar": str(file.parent / "sidecar")}
    with pytest.raises(SidecarError, match=f"has selection {selection}, the run none; give the same"):
        train(train_config(tmp_path, model_dir, run="other", **other))
    again = train_config(
        tmp_path, model_dir, run="again", **{**settings, "init_sidecar": str(file.parent / "sidecar")}
    )
    train(again)
    assert not RunFolder(again).storage.exists(FITTED), "what it starts from has a map"


def test_a_sidecar_of_equal_heads_goes_on_with_shares_and_keeps_its_map(
    tmp_path: Path, model_dir: Path
) -> None:
    equal = train_config(tmp_path, model_dir, run="equal", selection="topk", rank=4)
    train(equal)
    start = Path(RunFolder(equal).location) / "sidecar"
    further = train_config(
        tmp_path, model_dir, run="further", selection="heads", rank=4, init_sidecar=str(start)
    )
    train(further)
    fitted = load_file(Path(RunFolder(further).location) / FITTED)
    before, after = Sidecar.load(start), Sidecar.load(Path(RunFolder(further).location) / "sidecar")
    assert torch.equal(after.shares(), fitted["shares"].to(torch.bfloat16))
    for old, new in zip(before.layers, after.layers, strict=True):
        assert torch.equal(old["scores"].weight, new["scores"].weight)
    backwards = train_config(
        tmp_path,
        model_dir,
        run="backwards",
        selection="topk",
        rank=4,
        init_sidecar=str(Path(RunFolder(further).location) / "sidecar"),
    )
    with pytest.raises(SidecarError, match="has selection heads, the run topk; give the same"):
        train(backwards)


def test_shares_count_the_tokens_of_each_head_among_the_most_wanted_of_all() -> None:
    model, renderer = new_tiny_model(), ChatRenderer(tiny_tokenizer())
    ids = documents([37, 60])
    fitted = fit_selection(model, renderer, ids)
    prompt = renderer.question_ids([{"role": "user", "content": PROMPT}])
    wanted = []
    for one in ids:
        with torch.no_grad():
            _, scores = repetition_scores(model, prompt, one)
        every = sorted((float(x) for layer in scores for x in layer.flatten()), reverse=True)
        least = every[len(every) // 8 - 1]
        wanted.append(
            [[sum(float(x) >= least for x in head) / len(one) for head in layer] for layer in scores]
        )
    assert_near(fitted.shares[..., FRACTIONS.index(1 / 8)], torch.tensor(wanted).mean(dim=0))
    assert float(fitted.shares[..., FRACTIONS.index(1 / 2)].mean()) == pytest.approx(0.5, abs=0.02)


@pytest.mark.ray
@pytest.mark.parametrize("shard_base", [False, True])
def test_workers_share_one_map(ray_cluster: None, tmp_path: Path, model_dir: Path, shard_base: bool) -> None:
    alone = train_config(tmp_path, model_dir, run="alone", selection="heads", rank=4)
    shared = alone.model_copy(update={"run": "shared", "num_workers": 2, "shard_base": shard_base})
    train(alone)
    train(shared)
    fitted = [load_file(Path(RunFolder(c).location) / FITTED) for c in (alone, shared)]
    for name in ("weights", "shares"):
        assert_near(fitted[1][name], fitted[0][name], 1e-4)
    assert losses(shared) == pytest.approx(losses(alone), rel=1e-4)
