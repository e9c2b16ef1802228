"""Losses over predictions, each the mean over one question's predictions: questions count alike, whatever their length.

Shape legend: P predictions, V vocabulary, A questions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pipelines.train.asks import Predictions


def answer_losses(logits_PV: Tensor, wanted: Predictions, questions: int) -> Tensor:
    """(A,) cross-entropy on answer and end token."""
    each_P = F.cross_entropy(logits_PV.float(), wanted.targets, reduction="none")
    return mean_by_question(each_P, wanted.questions, questions, where=wanted.in_answer)


def divergences(
    student_PV: Tensor, teacher_PV: Tensor, wanted: Predictions, questions: int, *, temperature: float
) -> Tensor:
    """(A,) KL(teacher || student) at a temperature, times its square.

    Source: Distilling the Knowledge in a Neural Network (arXiv 1503.02531).
    """
    student = F.log_softmax(student_PV.float() / temperature, dim=-1)
    teacher = F.log_softmax(teacher_PV.float() / temperature, dim=-1)
    each_P = (teacher.exp() * (teacher - student)).sum(dim=-1) * temperature**2
    return mean_by_question(each_P, wanted.questions, questions)


def mean_by_question(
    each_P: Tensor, questions_P: Tensor, questions: int, *, where: Tensor | None = None
) -> Tensor:
    """(A,) means of a question's predictions, of those ``where`` is True."""
    weights = torch.ones_like(each_P) if where is None else where.to(each_P.dtype)
    sums = each_P.new_zeros(questions).index_add(0, questions_P, each_P * weights)
    counts = each_P.new_zeros(questions).index_add(0, questions_P, weights)
    return sums / counts.clamp(min=1.0)
