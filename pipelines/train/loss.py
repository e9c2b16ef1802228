"""Losses over predictions, each the mean over one ask's predictions: rows count alike, whatever their length.

Shape legend: P predictions, V vocabulary, A asks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pipelines.train.asks import Predictions


def answer_losses(logits_PV: Tensor, wanted: Predictions, asks: int) -> Tensor:
    """(A,) cross-entropy on answer and end token."""
    each_P = F.cross_entropy(logits_PV.float(), wanted.targets, reduction="none")
    return mean_by_ask(each_P, wanted.rows, asks, where=wanted.in_answer)


def divergences(
    student_PV: Tensor, teacher_PV: Tensor, wanted: Predictions, asks: int, *, temperature: float
) -> Tensor:
    """(A,) KL(teacher || student) at a temperature, times its square.

    Source: Distilling the Knowledge in a Neural Network (arXiv 1503.02531).
    """
    student = F.log_softmax(student_PV.float() / temperature, dim=-1)
    teacher = F.log_softmax(teacher_PV.float() / temperature, dim=-1)
    each_P = (teacher.exp() * (teacher - student)).sum(dim=-1) * temperature**2
    return mean_by_ask(each_P, wanted.rows, asks)


def mean_by_ask(each_P: Tensor, rows_P: Tensor, asks: int, *, where: Tensor | None = None) -> Tensor:
    """(A,) means of an ask's predictions, of those ``where`` is True."""
    weights = torch.ones_like(each_P) if where is None else where.to(each_P.dtype)
    sums = each_P.new_zeros(asks).index_add(0, rows_P, each_P * weights)
    counts = each_P.new_zeros(asks).index_add(0, rows_P, weights)
    return sums / counts.clamp(min=1.0)
