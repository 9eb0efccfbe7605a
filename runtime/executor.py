"""The executor: checks a run's tensors and launches the kernels of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tvm_attn.errors import DTypeError, PlanError, ShapeError, SpecError, VariantError
from tvm_attn.runtime.host import check_on_host
from tvm_attn.runtime.params import run_values
from tvm_attn.runtime.plan import Plan
from tvm_attn.spec import AttentionSpec, Param

LSE_SCALES = {"log2": 1.0, "ln": math.log(2.0)}
"""Factor from a base 2 LSE to the one asked for."""

Kernel = Callable[..., Any]
Scales = tuple[Any, Any, Any, Any]
Tensors = tuple[torch.Tensor, ...]


class Executor:
    """Runs planned batches for one kernel.

    Parameters
    ----------
    spec : AttentionSpec
        Shapes and dtypes to expect.
    params : sequence of Param
        The variant's parameters.
    use_softmax : bool
        Whether there is an LSE.
    kernels : mapping of str to callable
        Compiled kernel of each family.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        params: Sequence[Param],
        use_softmax: bool,
        kernels: Mapping[str, Kernel],
    ):
        self._spec = spec
        self._params = params
        self._use_softmax = use_softmax
        self._kernels = kernels
        self._heads = {"num_qo_heads": spec.num_qo_heads, "num_kv_heads": spec.num_kv_heads}
        self._q_dtype, self._kv_dtype, self._o_dtype = (
            getattr(torch, str(d)) for d in (spec.q_dtype, spec.kv_dtype, spec.o_dtype)
        )
        self._sm_scale = 1.0 / math.sqrt(spec.head_dim_qk)
        self._cache_shapes = tuple(self._cache_shape(d) for d in (spec.head_dim_qk, spec.dim_vo))
        self._ones = torch.ones(spec.num_kv_heads, dtype=torch.float32)

    def run(
        self,
        plan: Plan,
        q: torch.Tensor,
        kv: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        lse_base: str,
        scales: Scales,
        params: Mapping[str, Any],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention; see `AttentionModule.run`."""
        spec, nnz = self._spec, plan.nnz_qo
        k, v = self._caches(kv, plan)
        check_tensor("q", q, (nnz, spec.num_qo_heads, spec.head_dim_qk), self._q_dtype)
        if not self._use_softmax and (return_lse or lse is not None):
            raise VariantError("without softmax there is no LSE; run without return_lse and lse")
        if not isinstance(lse_base, str) or lse_base not in LSE_SCALES:
            raise SpecError(f"lse_base={lse_base!r} must be one of {tuple(LSE_SCALES)}")
        values = self._values(plan, params) if params or self._params else []
        factors = (*self._factors(*scales), LSE_SCALES[lse_base])
        if out is None:
            out = torch.empty(nnz, spec.num_qo_heads, spec.dim_vo, dtype=self._o_dtype)
        else:
            check_tensor("out", out, (nnz, spec.num_qo_heads, spec.dim_vo), self._o_dtype)
        if lse is None:
            lse = torch.empty(nnz, spec.num_qo_heads, dtype=torch.float32)
        else:
            check_tensor("lse", lse, (nnz, spec.num_qo_heads), torch.float32)
            if lse.stride(1) != 1:  # one head: any stride would do, but kernels expect 1
                raise ShapeError(f"lse has innermost stride {lse.stride(1)}, expected 1")
        for kernel, arguments in self._launches(plan, (q, k, v), (*factors, *values), (out, lse)):
            kernel(*arguments)
        return (out, lse) if return_lse else out

    def _launches(
        self, plan: Plan, inputs: Tensors, values: tuple[Any, ...], outputs: Tensors
    ) -> Iterator[tuple[Kernel, tuple[Any, ...]]]:
        """Yield every kernel to launch with its arguments, in the order of the definition's."""
        for work, partials in zip(plan.work, plan.partials, strict=True):
            arguments = (*inputs, *work.arrays, *plan.batch, *values, *partials, *outputs)
            yield self._kernels[work.family.name], arguments

    def launcher(
        self,
        plan: Plan,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> Callable[[], None]:
        """Return a function that launches the kernels and does nothing else, to be timed."""
        values = self._values(plan, {})
        factors = (*self._factors(None, None, None, None), 1.0)
        inputs = (q, *self._caches(kv, plan))
        launches = list(self._launches(plan, inputs, (*factors, *values), (out, lse)))

        def launch() -> None:
            for kernel, arguments in launches:
                kernel(*arguments)

        return launch

    def _values(self, plan: Plan, params: Mapping[str, Any]) -> list[Any]:
        sizes = {**self._heads, "batch": plan.batch_size}
        return run_values(self._params, params, plan.params, sizes)

    def _caches(
        self, kv: torch.Tensor | tuple[torch.Tensor, torch.Tensor], plan: Plan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V as ``[pages, page_size, heads, dim]`` or ``[pages, heads, ...]``."""
        spec = self._spec
        if isinstance(kv, torch.Tensor):
            if not spec.is_paged or kv.ndim != 5 or kv.shape[1] != 2:
                raise ShapeError(
                    f"kv has shape {tuple(kv.shape)}; pass a (k, v) tuple, or a paged cache of "
                    "[num_pages, 2, ...] with 5 axes"
                )
            k, v = kv.unbind(1)
        else:
            if not isinstance(kv, tuple | list) or len(kv) != 2:
                raise DTypeError(f"kv must be a (k, v) tuple or a fused cache, got {type(kv)}")
            k, v = kv
        for name, cache, shape in zip("kv", (k, v), self._cache_shapes, strict=True):
            check_tensor(name, cache, shape, self._kv_dtype)
        return self._located(k, v, plan)

    def _cache_shape(self, dim: int) -> tuple[int | None, ...]:
        spec = self._spec
        tokens, heads = spec.page_size, spec.num_kv_heads
        shape = (heads, tokens, dim) if spec.kv_layout == "HND" else (tokens, heads, dim)
        return (None, *shape) if spec.is_paged else shape

    def _located(
        self, k: torch.Tensor, v: torch.Tensor, plan: Plan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Check that every token planned for exists, and view ragged K/V as pages of one token."""
        if self._spec.is_paged:
            pages = min(k.shape[0], v.shape[0])
            if plan.max_page >= pages:
                raise PlanError(
                    f"kv has {pages} pages, the plan refers to page {plan.max_page}; "
                    "pass the cache the page table belongs to"
                )
            return k, v
        axis = 1 if self._spec.kv_layout == "HND" else 0
        tokens = min(k.shape[axis], v.shape[axis])
        if plan.num_kv_tokens > tokens:
            raise PlanError(f"kv has {tokens} tokens, the plan covers {plan.num_kv_tokens}")
        if axis:
            return k.transpose(0, 1).unsqueeze(2), v.transpose(0, 1).unsqueeze(2)
        return k.unsqueeze(1), v.unsqueeze(1)

    def _factors(
        self, sm_scale: Any, q_scale: Any, k_scale: Any, v_scale: Any
    ) -> tuple[torch.Tensor, torch.Tensor, float, float]:
        return (
            self._head_scales("k_scale", k_scale),
            self._head_scales("v_scale", v_scale),
            self._sm_scale if sm_scale is None else _number("sm_scale", sm_scale),
            1.0 if q_scale is None else _number("q_scale", q_scale),
        )

    def _head_scales(self, name: str, scale: Any) -> torch.Tensor:
        if scale is None:
            return self._ones
        if not isinstance(scale, torch.Tensor):
            return self._ones * _number(name, scale)
        check_on_host(name, scale)
        if scale.dtype != torch.float32:
            raise DTypeError(f"{name} has dtype {scale.dtype}; it must be float32")
        if scale.numel() == 1:
            return self._ones * scale.reshape(1)
        check_tensor(name, scale, (self._spec.num_kv_heads,), torch.float32)
        return scale.contiguous()


def check_tensor(
    name: str,
    tensor: Any,
    shape: tuple[int | None, ...],
    dtype: torch.dtype,
    *,
    contiguous: bool = False,
) -> None:
    """Raise a typed error unless a tensor is as the kernel expects it; None is any size."""
    if not isinstance(tensor, torch.Tensor):
        raise DTypeError(f"{name} must be a torch tensor, got {type(tensor).__name__}")
    if tensor.dtype is not dtype:
        raise DTypeError(f"{name} has dtype {tensor.dtype}, expected {dtype}")
    given = tensor.shape
    if given != shape and not _fits(given, shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ShapeError(f"{name} has shape {tuple(given)}, expected ({wanted})")
    check_on_host(name, tensor)
    if tensor.is_contiguous():
        return
    if contiguous:
        raise ShapeError(f"{name} must be contiguous; pass {name}.contiguous()")
    if tensor.stride(-1) != 1 and given[-1] != 1:
        raise ShapeError(
            f"{name} has innermost stride {tensor.stride(-1)}, expected 1; pass {name}.contiguous()"
        )


def _number(name: str, value: Any) -> float:
    """Return a scale given as a number, or as a tensor or array of one."""
    try:
        if isinstance(value, str | bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError) as error:
        raise DTypeError(f"{name}={value!r} must be a number") from error


def _fits(given: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    return len(given) == len(shape) and all(
        want is None or want == size for want, size in zip(shape, given, strict=True)
    )
