"""What the option ``residual`` adds to the first input of slots: something of the tokens a slot stands for.

Shape legend: B documents, N tokens (padded), M slots (padded), D hidden, k ratio.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from c2kv_core import hf_adapter
from c2kv_core.sidecar_config import SidecarConfig


class SlotResidual:
    """The addition for one batch at one ratio; with ``none`` every method gives its input back."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: SidecarConfig,
        ids_BN: Tensor,
        lengths: tuple[int, ...],
        ratio: int,
    ) -> None:
        self._kind, self._model, self._ids_BN = config.residual, model, ids_BN
        self._lengths, self._ratio = lengths, ratio

    def start(self, hidden_BMD: Tensor, positions_BM: Tensor) -> Tensor:
        """The slots' input; ``positions_BM`` are those of the last tokens of their blocks."""
        if self._kind != "embed_last":
            return hidden_BMD
        with torch.no_grad():
            last_BMD = hf_adapter.embed(self._model, self._ids_BN.gather(1, positions_BM))
        return hidden_BMD + last_BMD

    def projected(self, normed_BMD: Tensor, layer: hf_adapter.StockLayer) -> Tensor:
        """Input of the q, k and v projections of the first layer."""
        if self._kind != "embed_mean":
            return normed_BMD
        with torch.no_grad():
            tokens_BND = layer.input_layernorm(hf_adapter.embed(self._model, self._ids_BN))
            return normed_BMD + self._means(tokens_BND, normed_BMD.shape[1])

    def _means(self, tokens_BND: Tensor, slots: int) -> Tensor:
        """(B, M, D) means over the real tokens of each block; 0 where a block has none."""
        device = tokens_BND.device
        lengths_B = torch.tensor(self._lengths, device=device)
        real_BN = torch.arange(tokens_BND.shape[1], device=device) < lengths_B[:, None]
        right = slots * self._ratio - tokens_BND.shape[1]
        blocks = F.pad(tokens_BND * real_BN[..., None], (0, 0, 0, right)).unflatten(1, (slots, self._ratio))
        counts = F.pad(real_BN, (0, right)).unflatten(1, (slots, self._ratio)).sum(dim=2)
        means_BMD: Tensor = blocks.sum(dim=2) / counts.clamp(min=1)[..., None].to(blocks.dtype)
        return means_BMD
