"""Bad input raises its typed error, which says what is wrong, and leaves everything as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import tvm_attn as ta
from tests.batches import random_batch
from tests.cases import kernel
from tvm_attn import errors, variants
from tvm_attn.bsr import BSR
from tvm_attn.errors import (
    DTypeError,
    LimitError,
    PlanError,
    ShapeError,
    SpecError,
    TargetError,
    TvmAttnError,
    VariantError,
    WorkspaceError,
)
from tvm_attn.runtime.workspace import PlanLimits
from tvm_attn.spec import AttentionSpec, Param
from tvm_attn.variant import AttentionVariant

PAGED = AttentionSpec(8, 2, 64, q_dtype="float32", page_size=4)
RAGGED = replace(PAGED, page_size=None, kv_layout="HND")
LENS = ([1, 7, 0, 40], [200, 30, 5, 90])


@dataclass(frozen=True)
class Bad:
    """One bad input: keywords that replace good ones, the error, and words of its message."""

    given: dict[str, Any]
    error: type[TvmAttnError]
    words: tuple[str, ...]
    name: str = "window"
    spec: AttentionSpec = PAGED

    def assert_raised(self, call: Callable[[], Any]) -> None:
        with pytest.raises(self.error) as raised:
            call()
        message = str(raised.value)
        missing = [word for word in self.words if word not in message]
        assert not missing, f"{missing} not in {message!r}"


def bad(error: type[TvmAttnError], *words: str, **given: Any) -> Bad:
    return Bad(given, error, words)


def on(case: Bad, name: str, spec: AttentionSpec = PAGED) -> Bad:
    return replace(case, name=name, spec=spec)


def case_id(case: Bad) -> str:
    what = "-".join(re.sub(r"\W+", "_", word) for word in case.words[:2])
    return f"{'-'.join(case.given) or 'missing'}-{what}"[:60]


# Specs, variants, targets


@pytest.mark.parametrize(
    "case",
    [
        bad(SpecError, "num_qo_heads=7", "num_kv_heads=2", "multiple", num_qo_heads=7),
        bad(SpecError, "num_kv_heads=0", "at least 1", num_kv_heads=0),
        bad(SpecError, "num_qo_heads=8.0", "integer", num_qo_heads=8.0),
        bad(SpecError, "head_dim_qk=72", "64, 80", "256", head_dim_qk=72),
        bad(SpecError, "head_dim_vo=272", "64", "256", head_dim_vo=272),
        bad(SpecError, "head_dim_qk=0", "16", head_dim_qk=0),
        bad(SpecError, "q_dtype='float64'", "float16", "bfloat16", q_dtype="float64"),
        bad(SpecError, "q_dtype='float8_e4m3fn'", "float16", q_dtype="float8_e4m3fn"),
        bad(SpecError, "kv_dtype='float16'", "q_dtype='float32'", "e4m3", kv_dtype="float16"),
        bad(SpecError, "o_dtype='float8_e5m2'", "bfloat16", o_dtype="float8_e5m2"),
        bad(SpecError, "kv_layout='DHN'", "NHD", "HND", kv_layout="DHN"),
        bad(SpecError, "page_size=0", "at least 1", "None", page_size=0),
        bad(SpecError, "page_size=True", "integer", page_size=True),
    ],
    ids=case_id,
)
def test_specs(case: Bad) -> None:
    case.assert_raised(lambda: replace(PAGED, **case.given))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: variants.sliding_window(-2), ("window_left=-2", "at least -1")),
        (lambda: variants.sliding_window(2.5), ("window_left=2.5", "integer")),
        (lambda: Param("2x"), ("'2x'", "identifier")),
        (lambda: Param("x", kind="vector"), ("'x'", "'vector'", "scalar, tensor or bitmap")),
        (lambda: Param("x", kind="tensor"), ("'x'", "shape")),
        (lambda: Param("x", shape=(3,)), ("'x'", "only tensors")),
        (lambda: Param("x", kind="bitmap"), ("'x'", "plan")),
        (lambda: Param("x", kind="tensor", shape=(3,), default=1.0), ("'x'", "default")),
        (lambda: Param("x", narrows=True, at="plan"), ("'x'", "integer")),
        (lambda: Param("x", dtype="complex64"), ("'x'", "complex64", "float32")),
        (lambda: Param("x", at="build"), ("'x'", "'build'", "run", "plan")),
        (lambda: AttentionVariant(params=(Param("q_pos"),)), ("'q_pos'", "taken")),
        (lambda: AttentionVariant(params=(Param("k"), Param("k"))), ("'k'", "twice")),
        (lambda: AttentionVariant(mask=True), ("mask", "True", "function")),
        (lambda: variants.sigmoid() & variants.sink(), ("initial_state", "softmax")),
        (lambda: variants.alibi() & variants.alibi(), ("'alibi_slopes'", "rename")),
    ],
)
def test_variants(make: Callable[[], Any], words: tuple[str, ...]) -> None:
    bad(VariantError, *words).assert_raised(make)


def test_what_errors_call_a_variant() -> None:
    unnamed = AttentionVariant(mask=lambda ctx: ctx.kv_pos < 3)
    assert [str(v) for v in (AttentionVariant(), unnamed)] == ["full", "unnamed"]
    assert str(AttentionVariant() & variants.causal()) == "causal"
    assert str(variants.causal() & unnamed) == "causal & unnamed"


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"target": "sm_90"}, ("q_dtype=float32", "sm_90", "float16 or bfloat16")),
        ({"target": "riscv"}, ("'riscv'", "llvm")),
        ({"schedule": "sm90"}, ("schedule='sm90'", "'cpu'")),
    ],
)
def test_builds(keywords: dict[str, Any], words: tuple[str, ...]) -> None:
    bad(TargetError, *words).assert_raised(lambda: ta.build(PAGED, **keywords))


def test_specs_and_variants_of_another_type() -> None:
    bad(DTypeError, "variant", "'causal'", "AttentionVariant").assert_raised(
        lambda: ta.build(PAGED, "causal")
    )
    bad(DTypeError, "spec", "dict", "AttentionSpec").assert_raised(lambda: ta.build({}))


# Plans

INDEX_ARRAYS = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
OFFSETS = ("q_pos_offset", "kv_pos_offset")
GOOD_TABLE = dict(
    zip(
        INDEX_ARRAYS,
        (torch.tensor(x) for x in ([0, 1, 4], [0, 2, 5], [3, 1, 0, 5, 4], [3, 4])),
        strict=True,
    )
)


def changed(name: str, index: int, value: int) -> dict[str, torch.Tensor]:
    """The table with one entry changed."""
    array = GOOD_TABLE[name].clone()
    array[index] = value
    return {name: array}


def of_dtypes() -> list[Bad]:
    dtypes = (torch.float32, torch.int16, torch.uint8, torch.bool)
    return [
        bad(DTypeError, name, str(dtype), "int32 or int64", **{name: torch.ones(2, dtype=dtype)})
        for name in (*INDEX_ARRAYS, *OFFSETS)
        for dtype in dtypes
    ]


def of_forms() -> list[Bad]:
    cases = []
    for name in (*INDEX_ARRAYS, *OFFSETS):
        cases += [
            bad(ShapeError, name, "1-D", "(2, 1)", **{name: torch.ones(2, 1, dtype=torch.int32)}),
            bad(DTypeError, name, "array", **{name: "no array"}),
            bad(PlanError, name, str(2**31), "int32", **{name: torch.tensor([0, 2**31])}),
        ]
    cases += [
        bad(
            ShapeError, name, "5 entries", "2 requests", **{name: torch.zeros(5, dtype=torch.int32)}
        )
        for name in ("kv_indptr", "kv_last_page_len", *OFFSETS)
    ]
    return cases


def of_format(fmt: BSR, *words: str) -> Bad:
    """A format that the kernel is not for, given in place of the arrays."""
    return bad(SpecError, *words, qo_indptr=fmt, **dict.fromkeys(INDEX_ARRAYS[1:]))


PLANS = [
    *of_dtypes(),
    *of_forms(),
    bad(DTypeError, "kv_indptr", kv_indptr=None),
    bad(DTypeError, "kv_indices", kv_indices=None),
    bad(DTypeError, "kv_last_page_len", kv_last_page_len=None),
    bad(ShapeError, "qo_indptr", "empty", "[0]", qo_indptr=[]),
    bad(PlanError, "qo_indptr[0] is 1", "start at 0", **changed("qo_indptr", 0, 1)),
    bad(PlanError, "qo_indptr[2] is 0", "decrease", **changed("qo_indptr", 2, 0)),
    bad(PlanError, "qo_indptr[1] is -2", "decrease", **changed("qo_indptr", 1, -2)),
    bad(PlanError, "kv_indptr[0] is -1", "start at 0", **changed("kv_indptr", 0, -1)),
    bad(PlanError, "kv_indptr[2] is 1", "decrease", **changed("kv_indptr", 2, 1)),
    bad(PlanError, "kv_indices", "5 entries", "kv_indptr", "6", **changed("kv_indptr", 2, 6)),
    bad(PlanError, "kv_indices[3] is -7", "at least 0", **changed("kv_indices", 3, -7)),
    bad(PlanError, "kv_last_page_len[1] is 0", "1..4", **changed("kv_last_page_len", 1, 0)),
    bad(PlanError, "kv_last_page_len[0] is 5", "1..4", **changed("kv_last_page_len", 0, 5)),
    bad(PlanError, "kv_last_page_len[0] is -1", "1..4", **changed("kv_last_page_len", 0, -1)),
    bad(PlanError, "q_pos_offset", str(2**30 + 1), "2**29", q_pos_offset=[0, 2**30 + 1]),
    bad(PlanError, "kv_pos_offset", str(-(2**31)), "2**29", kv_pos_offset=[-(2**31), 0]),
    bad(PlanError, "qo_indptr", "request 1", "2**29", qo_indptr=[0, 1, 2**29]),
    bad(LimitError, "max_batch=2", "1", limits=PlanLimits(1, 100, 100)),
    bad(LimitError, "max_qo_tokens=4", "3", limits=PlanLimits(2, 3, 100)),
    bad(LimitError, "max_kv_tokens=20", "19", limits=PlanLimits(2, 100, 19)),
    bad(DTypeError, "limits", "tuple", "PlanLimits", limits=(2, 100, 100)),
    bad(DTypeError, "out", "str", "Plan", out="a plan"),
    bad(PlanError, "fixed_split_size=0", "at least 1", "None", fixed_split_size=0),
    bad(PlanError, "fixed_split_size=2.5", "integer", fixed_split_size=2.5),
    bad(PlanError, "max_qo_len=2", "3", max_qo_len=2),
    bad(PlanError, "max_qo_len='3'", "integer", max_qo_len="3"),
    bad(VariantError, "'windowleft'", "window_left", windowleft=3),
    bad(VariantError, "'custom_mask'", "window_left", custom_mask=torch.ones(26).bool()),
    bad(DTypeError, "window_left", "2.5", "integer", window_left=2.5),
    bad(DTypeError, "window_left", "nan", "integer", window_left=float("nan")),
    bad(DTypeError, "window_left", "'3'", "number", window_left="3"),
    bad(
        ShapeError,
        "qo_indptr",
        "meta",
        ".cpu()",
        **{name: array.to("meta") for name, array in GOOD_TABLE.items()},
    ),
    bad(
        ShapeError,
        "kv_indices",
        "meta",
        "cpu",
        kv_indices=torch.ones(5, dtype=torch.int32, device="meta"),
    ),
    on(bad(VariantError, "'custom_mask'", "required", "plan()", custom_mask=None), "custom_mask"),
    on(bad(PlanError, "custom_mask", "42", "43", custom_mask=torch.ones(42).bool()), "custom_mask"),
    on(
        bad(PlanError, "custom_mask", "5", "6 bytes", custom_mask=torch.ones(5).byte()),
        "custom_mask",
    ),
    on(
        bad(DTypeError, "custom_mask", "float32", "bool", custom_mask=torch.ones(43)), "custom_mask"
    ),
    on(bad(PlanError, "kv_indptr[2] is 1", **changed("kv_indptr", 2, 1)), "custom_mask"),
    on(bad(VariantError, "'alibi_slopes'", "run()", alibi_slopes=torch.ones(8)), "alibi"),
    of_format(BSR.from_page_table(*GOOD_TABLE.values(), 8), "page_size=8", "4"),
    of_format(BSR.from_ragged([0, 1], [0, 5]), "page_size=None", "4"),
    bad(PlanError, "kv_indptr", "format", qo_indptr=BSR.from_page_table(*GOOD_TABLE.values(), 4)),
    on(bad(PlanError, "request 1", "2**29", kv_indptr=[0, 7, 2**31 - 1]), "full", RAGGED),
    on(bad(TvmAttnError, "kv_indices", "ragged", kv_indices=[3, 1]), "full", RAGGED),
    on(bad(TvmAttnError, "kv_last_page_len", "ragged", kv_last_page_len=[1, 1]), "full", RAGGED),
]
"""Bad plans of two requests: 1 and 3 query tokens, 7 and 12 KV tokens in pages of 4."""


def good_plan(name: str, spec: AttentionSpec) -> dict[str, Any]:
    """Arguments that every kernel takes for that batch."""
    if not spec.is_paged:
        return {"qo_indptr": [0, 1, 4], "kv_indptr": [0, 7, 19]}
    mask = {"custom_mask": torch.ones(43, dtype=torch.bool)} if name == "custom_mask" else {}
    return {**GOOD_TABLE, **mask}


def good_run(name: str, spec: AttentionSpec) -> dict[str, Any]:
    """Tensors for that batch, the outputs filled with sevens."""
    rng = torch.Generator().manual_seed(0)
    shape = (6, 4, 2, 64) if spec.is_paged else (2, 19, 64)
    given = {
        "q": torch.randn(4, 8, 64, generator=rng),
        "kv": (torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)),
        "out": torch.full((4, 8, 64), 7.0),
        "lse": torch.full((4, 8), 7.0),
    }
    slopes = {"alibi_slopes": torch.ones(8)} if name == "alibi" else {}
    outputs = given if name != "sigmoid" else {k: v for k, v in given.items() if k != "lse"}
    return {**outputs, **slopes}


@pytest.mark.parametrize("case", PLANS, ids=case_id)
def test_plans(case: Bad) -> None:
    module = kernel(case.name, case.spec)
    good, tensors = good_plan(case.name, case.spec), good_run(case.name, case.spec)
    plan = module.plan(**good)
    before = module.run(plan, **tensors).clone()
    case.assert_raised(lambda: module.plan(**{"out": plan, **good, **case.given}))
    assert torch.equal(module.run(plan, **tensors), before), "the earlier plan has changed"


def test_a_workspace_that_does_not_serve() -> None:
    module = kernel("window", PAGED).with_ctas(7)
    fmt = random_batch(PAGED, *LENS).fmt
    needed = sum(o.nbytes + lse.nbytes for o, lse in module.plan(fmt, fixed_split_size=16).partials)
    assert needed > 100
    for workspace, error, words in (
        (torch.empty(100, dtype=torch.uint8), WorkspaceError, ("100 bytes", "workspace_size")),
        (torch.empty(2 * needed, dtype=torch.uint8)[::2], ShapeError, ("contiguous",)),
        (torch.empty(2 * needed, dtype=torch.uint8)[1:], ShapeError, ("aligned",)),
        (torch.empty(needed, dtype=torch.uint8, device="meta"), ShapeError, ("meta",)),
        (bytearray(needed), DTypeError, ("bytearray", "tensor")),
    ):
        case = bad(error, "workspace", *words)
        case.assert_raised(lambda w=workspace: module.plan(fmt, fixed_split_size=16, workspace=w))


# Runs

Q, CACHE = (4, 8, 64), (6, 4, 2, 64)


def kv(k: torch.Tensor | None = None, v: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    return tuple(torch.ones(CACHE) if x is None else x for x in (k, v))


def of_caches() -> list[Bad]:
    cases = []
    for name in "kv":
        cases += [
            bad(
                DTypeError,
                f"{name} ",
                "float16",
                "float32",
                kv=kv(**{name: torch.ones(CACHE).half()}),
            ),
            bad(
                ShapeError,
                f"{name} ",
                "(6, 4, 2, 32)",
                "64",
                kv=kv(**{name: torch.ones(6, 4, 2, 32)}),
            ),
            bad(ShapeError, f"{name} ", "(6, 2, 4, 64)", kv=kv(**{name: torch.ones(6, 2, 4, 64)})),
            bad(ShapeError, f"{name} ", "(6, 5, 2, 64)", kv=kv(**{name: torch.ones(6, 5, 2, 64)})),
            bad(ShapeError, f"{name} ", "(4, 2, 64)", kv=kv(**{name: torch.ones(4, 2, 64)})),
            bad(
                ShapeError,
                f"{name} ",
                "stride 2",
                "contiguous()",
                kv=kv(**{name: torch.ones(6, 4, 2, 128)[..., ::2]}),
            ),
            bad(
                ShapeError,
                f"{name} ",
                "meta",
                "CPU",
                kv=kv(**{name: torch.ones(CACHE, device="meta")}),
            ),
            bad(PlanError, "5 pages", "page 5", kv=kv(**{name: torch.ones(5, 4, 2, 64)})),
            bad(DTypeError, f"{name} ", "list", "tensor", kv=kv(**{name: [1.0]})),
        ]
    return cases


RUNS = [
    bad(DTypeError, "plan", "NoneType", "Plan", plan=None),
    bad(DTypeError, "q ", "ndarray", "tensor", q=np.ones(Q, np.float32)),
    bad(DTypeError, "q ", "bfloat16", "float32", q=torch.ones(Q).bfloat16()),
    bad(ShapeError, "q ", "(3, 8, 64)", "(4, 8, 64)", q=torch.ones(3, 8, 64)),
    bad(ShapeError, "q ", "(4, 4, 64)", "(4, 8, 64)", q=torch.ones(4, 4, 64)),
    bad(ShapeError, "q ", "(4, 512)", "(4, 8, 64)", q=torch.ones(4, 512)),
    bad(ShapeError, "q ", "stride 8", "q.contiguous()", q=torch.ones(4, 64, 8).transpose(1, 2)),
    bad(ShapeError, "q ", "meta", "CPU", q=torch.ones(Q, device="meta")),
    *of_caches(),
    bad(DTypeError, "kv ", "NoneType", "(k, v)", kv=None),
    bad(DTypeError, "kv ", "(k, v)", kv=(torch.ones(CACHE),)),
    bad(ShapeError, "kv ", "(6, 4, 2, 64)", "2, ...", kv=torch.ones(CACHE)),
    bad(ShapeError, "kv ", "(6, 3, 4, 2, 64)", "2, ...", kv=torch.ones(6, 3, 4, 2, 64)),
    bad(DTypeError, "out ", "float16", "float32", out=torch.ones(Q).half()),
    bad(ShapeError, "out ", "(4, 8, 32)", "(4, 8, 64)", out=torch.ones(4, 8, 32)),
    bad(ShapeError, "out ", "stride 2", "contiguous", out=torch.ones(4, 8, 128)[..., ::2]),
    bad(DTypeError, "lse ", "float64", "float32", lse=torch.ones(4, 8).double()),
    bad(ShapeError, "lse ", "(8, 4)", "(4, 8)", lse=torch.ones(8, 4)),
    bad(ShapeError, "lse ", "contiguous", lse=torch.ones(8, 4).T),
    bad(SpecError, "lse_base='log10'", "log2", "ln", lse_base="log10"),
    bad(DTypeError, "sm_scale", "'1'", "number", sm_scale="1"),
    bad(DTypeError, "q_scale=[1.0]", "number", q_scale=[1.0]),
    bad(DTypeError, "k_scale=[1.0, 2.0]", "number", k_scale=[1.0, 2.0]),
    bad(DTypeError, "k_scale", "float64", "float32", k_scale=torch.ones(2).double()),
    bad(ShapeError, "v_scale", "(3,)", "(2)", v_scale=torch.ones(3)),
    bad(ShapeError, "v_scale", "(2, 2)", "(2)", v_scale=torch.ones(2, 2)),
    bad(ShapeError, "v_scale", "meta", "CPU", v_scale=torch.ones(2, device="meta")),
    bad(PlanError, "window_left=21", "20", "plan", window_left=21),
    bad(PlanError, "window_left=-1", "20", "plan", window_left=-1),
    bad(DTypeError, "window_left", "1.5", "integer", window_left=1.5),
    bad(VariantError, "'soft_cap'", "window_left", soft_cap=1.0),
    on(bad(VariantError, "'window_left'", "none", window_left=3), "custom_mask"),
    on(
        bad(VariantError, "'custom_mask'", "plan()", custom_mask=torch.ones(43).bool()),
        "custom_mask",
    ),
    on(bad(VariantError, "'alibi_slopes'", "required", "run()", alibi_slopes=None), "alibi"),
    on(bad(ShapeError, "alibi_slopes", "(4,)", "(8)", alibi_slopes=torch.ones(4)), "alibi"),
    on(bad(ShapeError, "alibi_slopes", "(8, 1)", "(8)", alibi_slopes=torch.ones(8, 1)), "alibi"),
    on(
        bad(DTypeError, "alibi_slopes", "float16", "float32", alibi_slopes=torch.ones(8).half()),
        "alibi",
    ),
    on(bad(DTypeError, "alibi_slopes", "list", "tensor", alibi_slopes=[1.0] * 8), "alibi"),
    on(
        bad(ShapeError, "alibi_slopes", "meta", "CPU", alibi_slopes=torch.ones(8, device="meta")),
        "alibi",
    ),
    on(bad(VariantError, "LSE", "softmax", return_lse=True), "sigmoid"),
    on(bad(VariantError, "LSE", "softmax", lse=torch.ones(4, 8)), "sigmoid"),
    on(bad(PlanError, "18 tokens", "19", kv=(torch.ones(2, 18, 64),) * 2), "full", RAGGED),
    on(bad(ShapeError, "k ", "(4, 19, 64)", kv=(torch.ones(4, 19, 64),) * 2), "full", RAGGED),
    on(
        bad(ShapeError, "kv ", "(2, 2, 19, 64)", "(k, v)", kv=torch.ones(2, 2, 19, 64)),
        "full",
        RAGGED,
    ),
]


@pytest.mark.parametrize("case", RUNS, ids=case_id)
def test_runs(case: Bad) -> None:
    module = kernel(case.name, case.spec)
    window = {"window_left": 20} if case.name == "window" else {}
    plan = module.plan(**good_plan(case.name, case.spec), **window)
    good = {"plan": plan, **good_run(case.name, case.spec)}
    case.assert_raised(lambda: module.run(**{**good, **case.given}))
    assert (good["out"] == 7.0).all(), "something was computed"
    expected = module.run(**{**good, "out": torch.empty(4, 8, 64)})
    assert torch.equal(module.run(**good), expected)


def test_plans_of_other_kernels() -> None:
    module, other = kernel("window", PAGED), kernel("custom_mask", PAGED)
    theirs = other.plan(**good_plan("custom_mask", PAGED))
    tensors = good_run("window", PAGED)
    case = bad(VariantError, "plan", "another kernel")
    case.assert_raised(lambda: module.run(theirs, **tensors))
    case.assert_raised(lambda: module.plan(**GOOD_TABLE, out=theirs))
    wider = module.with_ctas(7)
    case.assert_raised(lambda: wider.run(module.plan(**GOOD_TABLE), **tensors))


@pytest.mark.parametrize("num_ctas", [0, -1, 2.0, True])
def test_numbers_of_ctas(num_ctas: Any) -> None:
    case = bad(SpecError, f"num_ctas={num_ctas!r}", "at least 1")
    case.assert_raised(lambda: kernel("window", PAGED).with_ctas(num_ctas))


@pytest.mark.parametrize("given", [(-1, 1, 1), (1, 2.5, 1), (1, 1, "3")])
def test_limits(given: tuple[Any, ...]) -> None:
    name = ("max_batch", "max_qo_tokens", "max_kv_tokens")[
        next(i for i in range(3) if given[i] != 1)
    ]
    bad(SpecError, name, "at least 0").assert_raised(lambda: PlanLimits(*given))


@pytest.mark.parametrize("name", ["ptx", "sass"])
def test_what_a_cpu_kernel_does_not_have(name: str) -> None:
    case = bad(TargetError, name.upper(), "llvm", ".source")
    case.assert_raised(lambda: getattr(kernel("window", PAGED), name))


def test_every_error_is_of_this_library_and_of_a_builtin_kind() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in kinds:
        assert issubclass(kind, TvmAttnError)
        if kind is not TvmAttnError:
            assert issubclass(kind, (ValueError, TypeError, RuntimeError))
