"""Scores straight from products: a hook on logits folded into the step to weights.

A hook that is a polynomial in the logit, as biases are and soft caps are near 0, takes no pass of
its own over a block: its coefficients, times all that a product is multiplied with, are the same
for all keys, and the reference of the softmax is one more constant.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import tvm_ffi
from tvm import sym, tirx
from tvm.script import tirx as T

from tvm_attn.schedules.primitives.cta import Cta
from tvm_attn.schedules.primitives.fragments import HALVES
from tvm_attn.schedules.primitives.pairs import on_key
from tvm_attn.schedules.primitives.shapes import COLUMNS
from tvm_attn.schedules.primitives.task import LaneRows
from tvm_attn.tir.hooks import Hooks
from tvm_attn.tir.polynomial import Polynomial, depends_on, polynomial, steps
from tvm_attn.tir.states import f32
from tvm_attn.tir.tanh import NEAR, Series, tanh_arguments, with_tanh_near_zero
from tvm_attn.variant import Expr

QUERY = ("batch", "kv_head", "qo_len", "kv_len", "qo_idx", "q_pos", "qo_head")
KEY = ("kv_idx", "kv_pos")
SIDE_BY_SIDE = 16
"""Scores that are made at a time: a multiplication waits for the one before it."""
OFFSET = tirx.Var("offset", "int32")
"""Of a key from the lane's first one in a block."""
CHAINS = 4
"""Maxima that are found side by side."""

_LARGEST_OF_THREE = """
__device__ __forceinline__ int largest_of_three(int a, float b, float c) {
  return __vimax3_s32(a, __float_as_int(b), __float_as_int(c));
}
"""


def is_folded(hooks: Hooks) -> bool:
    """Whether a hook's logits are polynomials with coefficients that are the same for all keys.

    Near 0, as long as ``tanh`` is called with multiples of the logit.
    """
    if hooks.variant.logits_transform is None or not hooks.variant.use_softmax:
        return False
    fields = {name: tirx.Var(name, "int32") for name in (*QUERY, *KEY)}
    x = tirx.Var("product", "float32")
    logit = hooks.logit(hooks.context(**fields), x)
    terms = polynomial(with_tanh_near_zero(logit), x)
    arguments = [polynomial(argument, x) for argument in tanh_arguments(logit)]
    if terms is None or any(a is None or a.keys() != {1} for a in arguments):
        return False
    slopes = [c for power, c in terms.items() if power > 0]
    slopes += [a[1] for a in arguments if a is not None]
    return not any(depends_on(slope, fields[key]) for slope in slopes for key in KEY)


def is_bounded(hooks: Hooks) -> bool:
    """Whether the largest product says how large a score of a folded hook can be."""
    fields = {name: tirx.Var(name, "int32") for name in (*QUERY, *KEY)}
    x = tirx.Var("product", "float32")
    logit = hooks.logit(hooks.context(**fields), x)
    terms = polynomial(with_tanh_near_zero(logit), x)
    return bool(tanh_arguments(logit)) and terms is not None and 0 not in terms


@dataclass(frozen=True)
class Element:
    """A score of the lane: row `i`, element `e` of key tile `n`."""

    i: int
    n: int
    e: int


def elements(cta: Cta, begin: int, end: int) -> list[Element]:
    """Return the lane's scores in key tiles `begin` to `end`."""
    places = itertools.product(range(begin, end), range(cta.rows), range(2))
    return [Element(i, n, e) for n, i, e in places]


def register(cta: Cta, at: Element) -> Any:
    """Return the index of an element among the lane's scores."""
    return cta.score(at.i // HALVES, at.n, at.i % HALVES, at.e)


def largest_of_three(a: Expr, b: Expr, c: Expr) -> Expr:
    """Return the largest of an integer and the bits of two floats, as an integer."""
    return T.cuda.func_call(
        "largest_of_three", a, b, c, source_code=_LARGEST_OF_THREE, return_type="int32"
    )


@dataclass(frozen=True)
class Fold:
    """A folded hook on the rows of an item, its coefficients in registers.

    ``series[i]`` are the coefficients for row `i` as `polynomial.steps` orders them, ``power`` that
    of what they are a series in, ``steepest`` what a product is at most multiplied with to become
    the argument of a ``tanh``, if there is one, and ``reach`` how large that may be. ``rests`` has
    room for what is subtracted from the scores of each row.
    """

    cta: Cta
    rows: LaneRows
    power: int
    series: Sequence[Sequence[Expr]]
    steepest: Expr | None
    reach: float
    biases: Sequence[Bias] | None
    rests: Any

    @staticmethod
    def prepare(cta: Cta, rows: LaneRows, kv0: Expr, tanh: Series = NEAR) -> Fold:
        """Compute the coefficients for the block that begins with key `kv0`."""
        exprs, slopes, power = [], [], 1
        x = tirx.Var("product", "float32")
        for i in range(cta.rows):
            logit = cta.hooks.logit(rows.pair(i, T.int32(0)), x * rows.factor)
            for argument in tanh_arguments(logit):
                slopes.append(tirx.abs((polynomial(argument, x) or {})[1]))
            power, series = steps(score_terms(cta, rows, i, T.int32(0), tanh))
            exprs.append(series)
        is_same = all(tvm_ffi.structural_equal(list(e), list(exprs[0])) for e in exprs)
        held = [hold(exprs[0])] * cta.rows if is_same else [hold(e) for e in exprs]
        steepest = hold([reduce(tirx.max, slopes)])[0] if slopes else None
        biases = linear_biases(cta, rows, kv0 + cta.lane.column(0) + last_offset(cta))
        rests = T.alloc_local((cta.rows,), "float32")
        return Fold(cta, rows, power, held, steepest, tanh.reach, biases, rests)

    def scored(self, i: int, x: Expr) -> Expr:
        """Return the score of a product in row `i`, but for what does not depend on the product."""
        slope, *others = self.series[i]
        for coefficient in others:
            slope = slope * (x * x if self.power == 2 else x) + coefficient
        return x * slope

    def relative(self, i: int, x: Expr) -> Expr:
        """Return the score of a product in row `i`, of which nothing else is, minus the rest."""
        return self.scored(i, x) - self.rests[i]

    def begin_at(self, references: Sequence[Expr]) -> None:
        """Let scores be relative to references."""
        for i, reference in enumerate(references):
            T.buffer_store(self.rests, reference, [i])

    def become_identity(self) -> None:
        """Let relative scores be what is there, as products were made them already."""
        for *others, slope in self.series:
            for coefficient in others:
                assign(coefficient, f32(0.0))
            assign(slope, f32(1.0))
        self.begin_at([f32(0.0)] * self.cta.rows)

    def score(self, some: Sequence[Element], kv0: Expr, less: Sequence[Expr]) -> None:
        """Turn products into scores minus what `less` has for each row, step by step together."""
        c = self.cta.registers.score
        places = [register(self.cta, at) for at in some]
        length = len(self.series[0])
        slopes = [self.series[at.i][0] for at in some]
        if length > 1:
            powers = hold([c[at] * c[at] if self.power == 2 else c[at] for at in places])
            for step in range(1, length):
                terms = (self.series[at.i][step] for at in some)
                slopes = hold([f * x + c for f, x, c in zip(powers, slopes, terms, strict=True)])
        rests = self.constants(some, kv0, less)
        for place, slope, rest in zip(places, slopes, rests, strict=True):
            T.buffer_store(c, c[place] * slope + rest, [place])

    def constants(self, some: Sequence[Element], kv0: Expr, less: Sequence[Expr]) -> list[Expr]:
        """Return what does not depend on the product in scores, minus what `less` has."""
        if self.biases is None:
            return [self.constant(at, kv0, less[at.i]) for at in some]
        last = [b.minus(x).last for b, x in zip(self.biases, less, strict=True)]
        before = (at.n * COLUMNS + at.e - last_offset(self.cta) for at in some)
        biases = ((self.biases[at.i], last[at.i]) for at in some)
        return hold(
            [b.slope * f32(b.step * n) + end for (b, end), n in zip(biases, before, strict=True)]
        )

    def constant(self, at: Element, kv0: Expr, less: Expr) -> Expr:
        """Return what does not depend on the product in the score of an element, minus `less`."""
        return on_key(
            lambda key: score_terms(self.cta, self.rows, at.i, key).get(0, f32(0.0)) - less,
            kv0 + self.cta.lane.column(0),
            at.n * COLUMNS + at.e,
            self.rows.end_key,
        )

    def reaches(
        self, some: Sequence[Element], references: Sequence[Expr], slack: float, has_empty: Expr
    ) -> Expr:
        """Whether some of the lane's products may leave what the polynomial is good for.

        Or, if they are bounded, may make a score that is more than `slack` above its reference.
        """
        if self.steepest is None:
            return has_empty
        size = self.largest_product(some)
        excess = size * self.steepest - f32(self.reach)
        if is_bounded(self.cta.hooks):
            for bound, reference in zip(self.bounds(size), references, strict=True):
                excess = tirx.max(excess, bound - (reference + f32(slack)))
        return tirx.Or(has_empty, excess > f32(0.0))

    def largest_product(self, some: Sequence[Element]) -> Expr:
        """Find the largest magnitude of some of the lane's products."""
        return hold([largest_product(self.cta, some)])[0]

    def bounds(self, size: Expr) -> list[Expr]:
        """How much of a score, at most, products of up to a `size` make, in each row."""
        factor = size * size if self.power == 2 else size
        bounds = []
        for series in self.series:
            bound = tirx.abs(series[0])
            for coefficient in series[1:]:
                bound = factor * bound + tirx.abs(coefficient)
            bounds.append(size * bound)
        return bounds


def assign(register: Any, value: Expr) -> None:
    """Assign to a register that `hold` has made."""
    T.buffer_store(register.source, value, register.indices)


def hold(values: Sequence[Expr]) -> list[Expr]:
    """Compute values into registers."""
    registers = T.alloc_local((len(values),), "float32")
    for i, value in enumerate(values):
        T.buffer_store(registers, value, [i])
    return [registers[i] for i in range(len(values))]


def score_terms(cta: Cta, rows: LaneRows, i: int, key: Expr, tanh: Series = NEAR) -> Polynomial:
    """Return the polynomial in a product that the score of a row and a key is."""
    x = tirx.Var("product", "float32")
    score = cta.hooks.logit(rows.pair(i, key), x * rows.factor) * f32(cta.hooks.accumulation.unit)
    terms = polynomial(with_tanh_near_zero(score, tanh), x)
    assert terms is not None
    return terms


def last_offset(cta: Cta) -> int:
    """Return how far the lane's last key in a block is from its first."""
    return (cta.key_tiles - 1) * COLUMNS + 1


@dataclass(frozen=True)
class Bias:
    """A bias that is linear in a distance: ``slope * distance + rest``.

    The distance is that of the lane's last key in a block, and changes by `step` with the key. As
    it is the largest one where keys are before their queries, the others are no less accurate than
    sums of floats are anyway.
    """

    distance: Expr
    step: int
    slope: Expr
    rest: Expr

    @property
    def last(self) -> Expr:
        """That of the lane's last key."""
        return self.slope * self.distance + self.rest

    def minus(self, reference: Expr) -> Bias:
        """Return the bias minus a reference."""
        return replace(self, rest=self.rest - reference)

    def settled(self, last: Expr) -> Bias:
        """Return the same bias, that of the last key being known."""
        return replace(self, distance=f32(0.0), rest=last)

    def largest(self, offset: int) -> Expr:
        """Return the larger one of the last key's bias, and of that `offset` keys before it."""
        return self.last + tirx.max(f32(0.0), self.slope * f32(-self.step * offset))


def linear_biases(cta: Cta, rows: LaneRows, last: Expr) -> list[Bias] | None:
    """Compute the biases of the lane's rows; None if there are none that are linear."""
    found = [_linear_bias(score_terms(cta, rows, i, last + OFFSET)) for i in range(cta.rows)]
    biases = []
    for bias in found:
        if bias is None:
            return None
        held = hold([tirx.Cast("float32", bias.distance), bias.slope, bias.rest])
        biases.append(Bias(held[0], bias.step, held[1], held[2]))
    return biases


def _linear_bias(terms: Polynomial) -> Bias | None:
    """Return the bias that a polynomial's constant is; its distance is still an integer."""
    casts: list[Any] = []
    if 0 in terms:
        tvm_ffi.structural_walk(terms[0], (tirx.Cast, casts.append))
    distances = [cast for cast in casts if depends_on(cast, OFFSET)]
    if not distances or not all(tvm_ffi.structural_equal(d, distances[0]) for d in distances):
        return None
    linear = sym.detect_linear_equation(distances[0].value, [OFFSET])
    if str(distances[0].value.ty) != "int32" or not linear:
        return None
    y = tirx.Var("distance", "float32")
    replaced = tvm_ffi.structural_map(
        terms[0], (tirx.Cast, lambda cast: y if depends_on(cast, OFFSET) else cast)
    )
    inner = polynomial(replaced, y)
    if not isinstance(linear[0], tirx.IntImm) or inner is None or max(inner) != 1:
        return None
    if any(depends_on(coefficient, OFFSET) for coefficient in inner.values()):
        return None
    return Bias(linear[1], int(linear[0].value), inner[1], inner.get(0, f32(0.0)))


def largest_product(cta: Cta, some: Sequence[Element]) -> Expr:
    """Return the largest magnitude of some of the lane's products, an even number of pairs."""
    c = cta.registers.score
    values = [tirx.abs(c[register(cta, at)]) for at in some]
    pairs = [tirx.max(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return tirx.reinterpret("float32", _largest(pairs))


def _largest(values: Sequence[Expr]) -> Expr:
    """Return the bits of the largest of 0 and an even number of floats."""
    chains: list[Expr] = [T.int32(0)] * CHAINS
    for place in range(0, len(values), 2):
        chain = place // 2 % CHAINS
        chains[chain] = largest_of_three(chains[chain], *values[place : place + 2])
    return reduce(tirx.max, chains)
