"""The executor: checks a run's tensors and launches the kernels of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tvm_attn.errors import DTypeError, PlanError, ShapeError, SpecError, VariantError
from tvm_attn.runtime.device import (
    CPU,
    check_rows,
    check_writable,
    elsewhere,
    has_contiguous_rows,
)
from tvm_attn.runtime.params import run_values
from tvm_attn.runtime.placement import Placement
from tvm_attn.runtime.plan import Plan
from tvm_attn.runtime.scales import HeadScales, number
from tvm_attn.spec import AttentionSpec, Param

LSE_SCALES = {"log2": 1.0, "ln": math.log(2.0)}
"""Factor from a base 2 LSE to the one asked for."""

Kernel = Callable[..., Any]
Scales = tuple[Any, Any, Any, Any]


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
    needs_rows : bool
        Whether kernels need rows that begin at multiples of 16 bytes.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        params: Sequence[Param],
        use_softmax: bool,
        kernels: Mapping[str, Kernel],
        needs_rows: bool = False,
    ):
        self._spec = spec
        self._params = params
        self._use_softmax = use_softmax
        self._kernels = kernels
        self._needs_rows = needs_rows
        self._heads = {"num_qo_heads": spec.num_qo_heads, "num_kv_heads": spec.num_kv_heads}
        self._q_dtype, self._kv_dtype, self._o_dtype = (
            getattr(torch, str(d)) for d in (spec.q_dtype, spec.kv_dtype, spec.o_dtype)
        )
        self._is_like_q = (spec.dim_vo, self._o_dtype) == (spec.head_dim_qk, self._q_dtype)
        self._sm_scale = 1.0 / math.sqrt(spec.head_dim_qk)
        self._cache_shapes = tuple(self._cache_shape(d) for d in (spec.head_dim_qk, spec.dim_vo))
        self._accepted: tuple[torch.Size, torch.Size] | None = None
        self._head_scales = HeadScales(spec.num_kv_heads)

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
        spec, nnz, placement = self._spec, plan.nnz_qo, plan.placement
        device, heads = placement.device, spec.num_qo_heads
        k, v = self._caches(kv, plan)
        check_tensor("q", q, (nnz, heads, spec.head_dim_qk), self._q_dtype, device)
        if not self._use_softmax and (return_lse or lse is not None):
            raise VariantError("without softmax there is no LSE; run without return_lse and lse")
        if not isinstance(lse_base, str) or lse_base not in LSE_SCALES:
            raise SpecError(f"lse_base={lse_base!r} must be one of {tuple(LSE_SCALES)}")
        values = self._values(plan, params) if params or self._params else ()
        factors = (*self._factors(placement, *scales), LSE_SCALES[lse_base])
        if out is None:
            out = self._output(q)
        else:
            check_tensor("out", out, (nnz, heads, spec.dim_vo), self._o_dtype, device)
            check_writable("out", out)
        if lse is not None:
            check_tensor("lse", lse, (nnz, heads), torch.float32, device)
            check_writable("lse", lse)
            if lse.stride(1) != 1:  # one head: any stride would do, but kernels expect 1
                raise ShapeError(f"lse has innermost stride {lse.stride(1)}, expected 1")
        elif return_lse:
            lse = torch.empty((nnz, heads), dtype=torch.float32, device=device)
        else:
            lse = placement.unread_lse((nnz, heads))
        if self._needs_rows:
            k, v = _not_empty(k), _not_empty(v)
            if not has_contiguous_rows(q, k, v, out):
                check_rows(q=q, k=k, v=v, out=out)
        for name, indices, partials in placement.packed[1]:
            self._kernels[name](q, k, v, *indices, *factors, *values, *partials, out, lse)
        return (out, lse) if return_lse else out

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
        factors = (*self._factors(plan.placement, None, None, None, None), 1.0)
        inputs = (q, *self._caches(kv, plan))
        launches = [
            (self._kernels[name], (*inputs, *indices, *factors, *values, *partials, out, lse))
            for name, indices, partials in plan.placement.packed[1]
        ]

        def launch() -> None:
            for kernel, arguments in launches:
                kernel(*arguments)

        return launch

    def _output(self, q: torch.Tensor) -> torch.Tensor:
        """Return room for the outputs of queries."""
        if self._is_like_q and q.is_contiguous():
            return torch.empty_like(q)
        spec = self._spec
        shape = (q.shape[0], spec.num_qo_heads, spec.dim_vo)
        return torch.empty(shape, dtype=self._o_dtype, device=q.device)

    def _values(self, plan: Plan, params: Mapping[str, Any]) -> list[Any]:
        sizes = {**self._heads, "batch": plan.batch_size}
        placement = plan.placement
        return run_values(self._params, params, placement.params, sizes, placement.device)

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
            if not isinstance(kv, (tuple, list)) or len(kv) != 2:
                raise DTypeError(f"kv must be a (k, v) tuple or a fused cache, got {type(kv)}")
            k, v = kv
        self._check_caches(k, v, plan.placement.device)
        return self._located(k, v, plan)

    def _check_caches(self, k: torch.Tensor, v: torch.Tensor, device: torch.device) -> None:
        """Check K and V; contiguous ones of the shapes of the run before pass at once."""
        dtype = self._kv_dtype
        if (
            type(k) is type(v) is torch.Tensor
            and (k.shape, v.shape) == self._accepted
            and k.dtype is dtype is v.dtype
            and k.device == device == v.device
            and k.is_contiguous()
            and v.is_contiguous()
        ):
            return
        of_k, of_v = self._cache_shapes
        check_tensor("k", k, of_k, dtype, device)
        check_tensor("v", v, of_v, dtype, device)
        self._accepted = k.shape, v.shape

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
            k_pages, v_pages = k.shape[0], v.shape[0]
            pages = k_pages if k_pages < v_pages else v_pages  # in a run, calls are not free
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

    @staticmethod
    def _factor(name: str, value: Any, placement: Placement) -> float:
        """Return a factor of all scores, which GPU kernels compare before they are scaled."""
        factor = number(name, value)
        if factor < 0.0 and placement.device.type == "cuda":
            raise SpecError(f"{name}={factor} must be at least 0 on a GPU; negate q instead")
        return factor

    def _factors(
        self, placement: Placement, sm_scale: Any, q_scale: Any, k_scale: Any, v_scale: Any
    ) -> tuple[torch.Tensor, torch.Tensor, float, float]:
        ones, of_heads = placement.packed[0], self._head_scales.of
        return (
            ones if k_scale is None else of_heads("k_scale", k_scale, placement),
            ones if v_scale is None else of_heads("v_scale", v_scale, placement),
            self._sm_scale if sm_scale is None else self._factor("sm_scale", sm_scale, placement),
            1.0 if q_scale is None else self._factor("q_scale", q_scale, placement),
        )


def _not_empty(cache: torch.Tensor) -> torch.Tensor:
    """Return a cache that has an address, if only of one page: a GPU must be able to copy it."""
    return cache if cache.shape[0] else cache.new_zeros(1, *cache.shape[1:])


def check_tensor(
    name: str,
    tensor: Any,
    shape: tuple[int | None, ...],
    dtype: torch.dtype,
    device: torch.device = CPU,
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
    if tensor.device != device:
        raise elsewhere(name, tensor, device)
    if tensor.is_contiguous():
        return
    if contiguous:
        raise ShapeError(f"{name} must be contiguous; pass {name}.contiguous()")
    if tensor.layout is not torch.strided:
        raise ShapeError(f"{name} is {tensor.layout}; pass {name}.to_dense()")
    if tensor.stride(-1) != 1 and given[-1] != 1:
        raise ShapeError(
            f"{name} has innermost stride {tensor.stride(-1)}, expected 1; pass {name}.contiguous()"
        )


def _fits(given: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    if len(given) != len(shape):
        return False
    for want, size in zip(shape, given, strict=True):  # in a loop, which is faster than all()
        if want != size and want is not None:
            return False
    return True
