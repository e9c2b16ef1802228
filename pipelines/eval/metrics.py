"""How an answer is judged: token F1, exact match and answer recall, each the best over all accepted answers.

Source: the evaluation script of SQuAD 1.1 (arXiv 1606.05250) for the normalisation and F1; as in that of MLQA
(arXiv 1910.07475) every Unicode punctuation character goes. Scripts written without blanks (Chinese, Japanese, Thai)
are compared by characters.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_ARTICLES = re.compile(r"\b(a|an|the)\b")
# Thai, kana, Han with its extensions and compatibility forms, half-width kana
_UNSPACED = re.compile(
    "([\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff])"
)


@dataclass(frozen=True, kw_only=True)
class Score:
    """One answer's marks, each from 0 to 1."""

    f1: float
    """Harmonic mean of precision and recall over words."""
    exact_match: float
    """1 where the words are those of an accepted answer."""
    answer_recall: float
    """1 where the words of an accepted answer occur in a row."""


def score(said: str, accepted: Sequence[str]) -> Score:
    """Marks of an answer; for each the best over the accepted answers."""
    said_words = words(said)
    accepted_words = [words(answer) for answer in accepted]

    def best(mark: Callable[[list[str], list[str]], float]) -> float:
        return max((mark(said_words, answer) for answer in accepted_words), default=0.0)

    return Score(f1=best(_f1), exact_match=best(_exact), answer_recall=best(_contained))


def words(text: str) -> list[str]:
    """Lower case, no punctuation, no articles; a character each in scripts without blanks."""
    bare = "".join(c for c in text.lower() if not _is_punctuation(c))
    return _UNSPACED.sub(r" \1 ", _ARTICLES.sub(" ", bare)).split()


def _is_punctuation(character: str) -> bool:
    return character in string.punctuation or unicodedata.category(character).startswith("P")


def _f1(said: list[str], accepted: list[str]) -> float:
    if not said or not accepted:
        return _exact(said, accepted)
    common = (Counter(said) & Counter(accepted)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(said), common / len(accepted)
    return 2 * precision * recall / (precision + recall)


def _exact(said: list[str], accepted: list[str]) -> float:
    return float(said == accepted)


def _contained(said: list[str], accepted: list[str]) -> float:
    # An answer of punctuation alone has no words; it would be contained in everything.
    if not accepted:
        return _exact(said, accepted)
    size = len(accepted)
    return float(any(said[at : at + size] == accepted for at in range(len(said) - size + 1)))
