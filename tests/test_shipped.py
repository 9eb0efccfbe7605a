"""The shipped kernels compile for every architecture, within what a multiprocessor has."""

from __future__ import annotations

import functools
from dataclasses import fields

import pytest

from tests.compiling import FIND, Kernel, compile_kernels, cover, kernels
from tvm_attn._pairwise import uncovered_pairs
from tvm_attn.shipped import OTHER_DIMS, TUNED_DIMS, Configuration, core, sample, shipped
from tvm_attn.target import ARCHS, parse_target
from tvm_attn.variant import AttentionVariant

OTHER = OTHER_DIMS[0]
PARTS = 12
"""Tests that share an architecture's kernels, each one or two: each arch has so many at least."""


@functools.cache
def chosen() -> tuple[Kernel, ...]:
    """Kernels of the sample, and of the core where those for a family of tiles would be slow."""
    hopper = [each for each in core() if (each.arch, each.group) == ("sm_90", 4)]
    return tuple(cover(sample(), hopper))


def test_the_sample_covers_all_pairs() -> None:
    """Head dims that are not tuned count as one choice."""
    rows = []
    for configuration in sample():
        row = {field.name: getattr(configuration, field.name) for field in fields(Configuration)}
        rows.append({**row, "dims": OTHER if row["dims"] in OTHER_DIMS else row["dims"]})
    factors = {name: sorted({row[name] for row in rows}, key=repr) for name in rows[0]}
    assert not uncovered_pairs(factors, rows)
    assert set(factors["dims"]) == {*TUNED_DIMS, OTHER}
    assert {c.dims for c in sample()} == {*TUNED_DIMS, *OTHER_DIMS}


@pytest.mark.parametrize("arch", ARCHS)
def test_each_architecture_has_enough_of_the_sample(arch: str) -> None:
    assert 12 <= sum(configuration.arch == arch for configuration in sample()) <= 20


def test_every_choice_meets_every_family_of_query_tiles() -> None:
    """And each configuration of the sample has a kernel, few of them more."""
    assert set(sample()) <= {kernel.configuration for kernel in chosen()} <= set(shipped())
    assert len(chosen()) <= 1.1 * len(sample())
    possible = [kernel for configuration in sample() for kernel in kernels(configuration)]
    met, to_meet = ({c for k in some for c in k.choices} for some in (chosen(), possible))
    assert met >= to_meet


def test_everything_shipped_is_named_once_and_can_be_asked_for() -> None:
    names = [str(configuration) for configuration in shipped()]
    assert len(set(names)) == len(names)
    assert {*core(), *sample()} == set(shipped())
    for configuration in shipped():
        assert configuration.spec.group_size == configuration.group
        assert isinstance(configuration.make_variant(), AttentionVariant)
        assert parse_target(configuration.target).arch is ARCHS[configuration.arch]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("arch", ARCHS)
def test_the_sample_compiles(arch: str, part: int) -> None:
    """By nvcc and by NVRTC: a query tile of each configuration, or more."""
    found = {kind: find() for kind, find in FIND.items()}
    compilers = [compiler for compiler in found.values() if compiler]
    if not compilers:
        pytest.skip("there is neither nvcc nor NVRTC")
    wanted = [kernel for kernel in chosen() if kernel.configuration.arch == arch]
    outcomes = compile_kernels(wanted[part::PARTS], compilers)
    assert len(outcomes) == len(wanted[part::PARTS]) * len(compilers)
    complaints = [outcome.complaint for outcome in outcomes if outcome.complaint]
    assert not complaints, "\n".join(complaints)
    missing = [kind for kind, compiler in found.items() if compiler is None]
    if missing:
        pytest.skip(f"compiled by {compilers[0].kind} alone: {missing[0]} is not installed")
