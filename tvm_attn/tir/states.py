"""How visible keys accumulate into a row's state: online softmax, or a plain sum."""

from __future__ import annotations

import math
from typing import Protocol

from tvm import tirx

from tvm_attn.variant import Expr

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
LEAST_NORMAL = 2.0**-126
"""Smallest float32 whose bits are an exponent and a mantissa."""


def f32(value: float) -> Expr:
    """Return a float32 constant."""
    return tirx.const(value, "float32")


class Accumulation(Protocol):
    """The scalar functions that the softmax phase of every kernel is made of."""

    hidden: float
    """Score of a key that is not visible."""
    lowest: float
    """A finite reference below any score: of a row that has seen no key."""
    unit: float
    """What a logit is multiplied with to become a score."""

    def peak(self, peak: Expr, score: Expr) -> Expr:
        """Fold a score into the row's running peak."""

    def outgrown(self, reference: Expr, score: Expr, slack: float) -> Expr:
        """Whether a score is too far above what weights are relative to."""

    def reference(self, peak: Expr) -> Expr:
        """Score that weighs 1, given the row's peak."""

    def weight(self, score: Expr, reference: Expr) -> Expr:
        """Weight of a score, or of what was accumulated under an older reference."""

    def rescale(self, old_peak: Expr, reference: Expr) -> Expr:
        """Factor that carries a state to a new reference."""

    def inverse(self, total: Expr) -> Expr:
        """Factor that turns an accumulated row into an output row."""

    def lse(self, reference: Expr, total: Expr) -> Expr:
        """Log-sum-exp (base 2) of a finished state."""


class OnlineSoftmax:
    """Softmax in base 2 over a stream of blocks (Milakov & Gimelshein, arXiv 1805.02867).

    A row's state is (peak, total, o): all weights are relative to ``2**peak``. A row that has seen
    no visible key has peak -inf; its reference is 0, so every weight is exactly 0, never NaN.
    """

    hidden = -math.inf
    lowest = -3.0e38
    unit = LOG2E

    def peak(self, peak: Expr, score: Expr) -> Expr:
        """Return the larger one."""
        return tirx.max(peak, score)

    def outgrown(self, reference: Expr, score: Expr, slack: float) -> Expr:
        """Whether the score would weigh more than ``2**slack``; any does in an empty row."""
        return score > reference + f32(slack)

    def reference(self, peak: Expr) -> Expr:
        """Return the peak, or 0 for an empty row."""
        return tirx.Select(peak == f32(-math.inf), f32(0.0), peak)

    def weight(self, score: Expr, reference: Expr) -> Expr:
        """Return ``2**(score - reference)``."""
        return tirx.exp2(score - reference)

    def rescale(self, old_peak: Expr, reference: Expr) -> Expr:
        """Return ``2**(old_peak - reference)``."""
        return tirx.exp2(old_peak - reference)

    def inverse(self, total: Expr) -> Expr:
        """Return ``1 / total``, and 0 for an empty row."""
        return tirx.Select(total == f32(0.0), f32(0.0), f32(1.0) / total)

    def lse(self, reference: Expr, total: Expr) -> Expr:
        """Return ``reference + log2(total)``: -inf for an empty row.

        Exponents are added by themselves, so that digits do not cancel where one is far below 0 and
        the other far above.
        """
        bits = tirx.reinterpret("int32", total)
        exponent = tirx.shift_right(bits, tirx.const(23, "int32")) - 127
        mantissa = tirx.bitwise_or(tirx.bitwise_and(bits, 0x7FFFFF), 0x3F800000)
        whole = reference + tirx.Cast("float32", exponent)
        lse = whole + tirx.log2(tirx.reinterpret("float32", mantissa))
        is_usual = tirx.And(total >= f32(LEAST_NORMAL), total < f32(math.inf))
        return tirx.Select(is_usual, lse, reference + tirx.log2(total))


class PlainSum:
    """No softmax: a score is its own weight, hidden keys weigh 0, parts add."""

    hidden = 0.0
    lowest = 0.0
    unit = 1.0

    def peak(self, peak: Expr, score: Expr) -> Expr:
        """Return the peak unchanged: there is none."""
        return peak

    def outgrown(self, reference: Expr, score: Expr, slack: float) -> Expr:
        """Never: there is no reference."""
        return tirx.const(False, "bool")

    def reference(self, peak: Expr) -> Expr:
        """Return 0."""
        return f32(0.0)

    def weight(self, score: Expr, reference: Expr) -> Expr:
        """Return the score."""
        return score

    def rescale(self, old_peak: Expr, reference: Expr) -> Expr:
        """Return 1."""
        return f32(1.0)

    def inverse(self, total: Expr) -> Expr:
        """Return 1: the sum is the output."""
        return f32(1.0)

    def lse(self, reference: Expr, total: Expr) -> Expr:
        """Return 1: as a score, it makes every part weigh 1 in a merge."""
        return f32(1.0)
