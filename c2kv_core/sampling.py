"""From logits to the next token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from c2kv_core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Smallest set of tokens whose probabilities sum to this much is kept (nucleus sampling, arXiv 1904.09751)."""
    seed: int | None = None
    """Seed of the request's own generator; None draws one from the system."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise InputError(f"expected a temperature of 0 to 100, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(f"expected top_p above 0 and at most 1, got {self.top_p}")


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """How likely a drawn token was, before temperature and nucleus."""

    token: int
    logprob: float
    """Natural logarithm."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens and their logprobs, the likeliest first."""


def logprob_of(logits_V: Tensor, token: int, *, top: int) -> TokenLogprob:
    """Of a token drawn from (vocabulary,) logits, with the ``top`` likeliest beside it."""
    logprobs_V = torch.log_softmax(logits_V.double(), dim=-1)
    values, ids = torch.topk(logprobs_V, min(top, len(logprobs_V)))
    likeliest = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token=token, logprob=float(logprobs_V[token]), top=likeliest)


class Sampler:
    """Draws tokens for one request; its random state is nobody else's."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed % 2**63)

    def draw(self, logits_V: Tensor) -> int:
        """The next token id from (vocabulary,) logits."""
        if self.params.temperature == 0.0:
            return int(logits_V.argmax())
        # The largest becomes 0 before the division, which in float32 would overflow at small temperatures.
        logits_V = logits_V.double().cpu()
        probabilities = torch.softmax((logits_V - logits_V.max()) / self.params.temperature, dim=-1).float()
        if self.params.top_p < 1.0:
            probabilities = _nucleus(probabilities, self.params.top_p)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


def _nucleus(probabilities_V: Tensor, top_p: float) -> Tensor:
    ordered, order = probabilities_V.sort(descending=True)
    # A token stays while the mass before it is below top_p; the first also where top_p rounds to 0.
    beyond = ordered.cumsum(0) - ordered >= top_p
    beyond[0] = False
    ordered[beyond] = 0.0
    return torch.zeros_like(probabilities_V).scatter(0, order, ordered)
