"""The executor: checks a run's tensors and launches the kernels of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tvm_attn.errors import DTypeError, PlanError, ShapeError, SpecError, VariantError
from tvm_attn.runtime.accepted import AcceptedRun, Launches, is_plain
from tvm_attn.runtime.device import (
    CPU,
    check_rows,
    check_writable,
    elsewhere,
    has_contiguous_rows,
    new_rows,
    new_tensor,
)
from tvm_attn.runtime.params import run_values
from tvm_attn.runtime.placement import Placement, is_capturing
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
        self._sm_scale = 1.0 / math.sqrt(spec.head_dim_qk)
        self._cache_shapes = tuple(self._cache_shape(d) for d in (spec.head_dim_qk, spec.dim_vo))
        self._is_ragged = not spec.is_paged
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
        placement = plan.placement
        k, v = kv if type(kv) is tuple and len(kv) == 2 else self._pair(kv)
        accepted = placement.accepted
        if accepted is None or not accepted.is_like(q, k, v, scales, lse_base, params):
            accepted = self._accept(plan, (q, k, v), lse_base, scales, params)
        if out is None:
            out = new_tensor(accepted.rows)
        elif not accepted.writes(out):
            self._check_out(plan, out)
            accepted.write(out)
        written = accepted.unread
        if written is None or return_lse or lse is not None:
            written = self._lse(plan, accepted, lse, return_lse)
        if accepted.lacks_pages:
            k, v = self._as_pages(k), self._as_pages(v)
        turn = placement.turn
        if turn is not None:
            turn.acquire()  # for half of what a with block takes
        try:
            for kernel, arguments in accepted.launches:
                kernel(q, k, v, *arguments, out, written)
        finally:
            if turn is not None:
                turn.release()
        return (out, written) if return_lse else out

    def _accept(
        self,
        plan: Plan,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        lse_base: str,
        scales: Scales,
        params: Mapping[str, Any],
    ) -> AcceptedRun:
        """Check inputs and options, and have runs like this one pass at once."""
        spec, placement, (q, k, v) = self._spec, plan.placement, inputs
        for name, cache, expected in zip("kv", (k, v), self._cache_shapes, strict=True):
            check_tensor(name, cache, expected, self._kv_dtype, placement.device)
        self._check_tokens(k, v, plan)
        shape = (plan.nnz_qo, spec.num_qo_heads, spec.head_dim_qk)
        check_tensor("q", q, shape, self._q_dtype, placement.device)
        if self._needs_rows and not has_contiguous_rows(q, k, v):
            check_rows(q=q, k=k, v=v)
        if not isinstance(lse_base, str) or lse_base not in LSE_SCALES:
            raise SpecError(f"lse_base={lse_base!r} must be one of {tuple(LSE_SCALES)}")
        values = self._values(plan, params) if params or self._params else []
        factors = (*self._factors(placement, *scales), LSE_SCALES[lse_base])
        launches = self._launches(plan, factors, values)
        rows = new_rows(q.shape[0], (spec.num_qo_heads, spec.dim_vo), self._o_dtype, q.device)
        axis = int(self._is_ragged and spec.kv_layout == "HND")
        most = min(k.shape[axis], v.shape[axis])
        accepted = AcceptedRun(inputs, scales, lse_base, params, launches, rows, most)
        accepted.lacks_pages = self._is_ragged or not (k.shape[0] and v.shape[0])
        if is_plain(scales, params) and not is_capturing(placement.device):
            placement.accepted = accepted
            if placement.there is not None and not placement.params:
                placement.there.keep_run(accepted, placement.launches)
        return accepted

    def _launches(self, plan: Plan, factors: tuple[Any, ...], values: list[Any]) -> Launches:
        """Return kernels, and what they take between their inputs and outputs."""
        launches = []
        for launch in plan.placement.launches:
            indices, partials = launch.packed
            arguments = (*indices, *factors, *values, *partials)
            launches.append((self._kernels[launch.family], arguments))
        return launches

    def launcher(
        self,
        plan: Plan,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> Callable[[], None]:
        """Return a function that launches the kernels and does nothing else, to be timed."""
        factors = (*self._factors(plan.placement, None, None, None, None), 1.0)
        k, v = map(self._as_pages, self._pair(kv))
        launches = [
            (kernel, (q, k, v, *arguments, out, lse))
            for kernel, arguments in self._launches(plan, factors, self._values(plan, {}))
        ]

        def launch() -> None:
            for kernel, arguments in launches:
                kernel(*arguments)

        return launch

    def _values(self, plan: Plan, params: Mapping[str, Any]) -> list[Any]:
        sizes = {**self._heads, "batch": plan.batch_size}
        placement = plan.placement
        return run_values(self._params, params, placement.params, sizes, placement.device)

    def _check_out(self, plan: Plan, out: torch.Tensor) -> None:
        spec = self._spec
        shape = (plan.nnz_qo, spec.num_qo_heads, spec.dim_vo)
        check_tensor("out", out, shape, self._o_dtype, plan.placement.device)
        check_writable("out", out)
        if self._needs_rows and not has_contiguous_rows(out):
            check_rows(out=out)

    def _lse(
        self, plan: Plan, accepted: AcceptedRun, lse: torch.Tensor | None, return_lse: bool
    ) -> Any:
        """Return where to write the LSE: what was given, new memory, or what nobody reads."""
        if lse is None and not return_lse:
            accepted.unread = plan.placement.unread_lse(plan.nnz_qo, self._spec.num_qo_heads)
            return accepted.unread
        if not self._use_softmax:
            raise VariantError("without softmax there is no LSE; run without return_lse and lse")
        shape, device = (plan.nnz_qo, self._spec.num_qo_heads), plan.placement.device
        if lse is None:
            if accepted.lse is None:
                accepted.lse = new_rows(shape[0], shape[1:], torch.float32, device)
            return new_tensor(accepted.lse)
        check_tensor("lse", lse, shape, torch.float32, device)
        check_writable("lse", lse)
        if lse.stride(1) != 1:  # one head: any stride would do, but kernels expect 1
            raise ShapeError(f"lse has innermost stride {lse.stride(1)}, expected 1")
        return lse

    def _pair(
        self, kv: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V, which may come in one tensor."""
        if isinstance(kv, torch.Tensor):
            if self._is_ragged or kv.ndim != 5 or kv.shape[1] != 2:
                raise ShapeError(
                    f"kv has shape {tuple(kv.shape)}; pass a (k, v) tuple, or a paged cache of "
                    "[num_pages, 2, ...] with 5 axes"
                )
            k, v = kv.unbind(1)
            return k, v
        if not isinstance(kv, (tuple, list)) or len(kv) != 2:
            raise DTypeError(f"kv must be a (k, v) tuple or a fused cache, got {type(kv)}")
        return kv[0], kv[1]

    def _cache_shape(self, dim: int) -> tuple[int | None, ...]:
        spec = self._spec
        tokens, heads = spec.page_size, spec.num_kv_heads
        shape = (heads, tokens, dim) if spec.kv_layout == "HND" else (tokens, heads, dim)
        return (None, *shape) if spec.is_paged else shape

    def _check_tokens(self, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> None:
        """Raise `PlanError` unless every token planned for exists."""
        if not self._is_ragged:
            pages = min(k.shape[0], v.shape[0])
            if plan.max_page >= pages:
                raise PlanError(
                    f"kv has {pages} pages, the plan refers to page {plan.max_page}; "
                    "pass the cache the page table belongs to"
                )
            return
        axis = 1 if self._spec.kv_layout == "HND" else 0
        tokens = min(k.shape[axis], v.shape[axis])
        if plan.num_kv_tokens > tokens:
            raise PlanError(f"kv has {tokens} tokens, the plan covers {plan.num_kv_tokens}")

    def _as_pages(self, cache: torch.Tensor) -> torch.Tensor:
        """Return K or V as ``[pages, page_size, heads, dim]`` or ``[pages, heads, ...]``.

        Ragged ones have pages of one token. On a GPU there is one page at least, if only to be read
        by nobody: it must be able to copy from there.
        """
        if self._is_ragged:
            by_token = cache.transpose(0, 1) if self._spec.kv_layout == "HND" else cache
            cache = by_token.unsqueeze(2 if self._spec.kv_layout == "HND" else 1)
        if self._needs_rows and not cache.shape[0]:
            return cache.new_zeros(1, *cache.shape[1:])
        return cache

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
        ones, of_heads = placement.packed_ones, self._head_scales.of
        return (
            ones if k_scale is None else of_heads("k_scale", k_scale, placement),
            ones if v_scale is None else of_heads("v_scale", v_scale, placement),
            self._sm_scale if sm_scale is None else self._factor("sm_scale", sm_scale, placement),
            1.0 if q_scale is None else self._factor("q_scale", q_scale, placement),
        )


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
    if tensor.is_nested:
        raise ShapeError(f"{name} is a nested tensor; pass {name}.values(), and where rows begin")
    if tensor.dtype is not dtype:
        raise DTypeError(f"{name} has dtype {tensor.dtype}, expected {dtype}")
    if tensor.is_neg():
        raise ShapeError(f"{name} is a view of negated elements; pass {name}.resolve_neg()")
    given = tensor.shape
    if given != shape and not _fits(given, shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ShapeError(f"{name} has shape {tuple(given)}, expected ({wanted})")
    if tensor.device != device:
        raise elsewhere(name, tensor, device)
    if tensor.layout is not torch.strided:
        raise ShapeError(f"{name} is {tensor.layout}; pass {name}.to_dense()")
    if not _has_memory(tensor):
        raise ShapeError(
            f"{name} has no memory that a kernel could use: it is a {type(tensor).__name__} that "
            "stands for others, as in torch.vmap or torch.func.grad, or for none"
        )
    if tensor.is_contiguous():
        return
    if contiguous:
        raise ShapeError(f"{name} must be contiguous; pass {name}.contiguous()")
    if tensor.stride(-1) != 1 and given[-1] != 1:
        raise ShapeError(
            f"{name} has innermost stride {tensor.stride(-1)}, expected 1; pass {name}.contiguous()"
        )


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return bool(tensor.data_ptr()) or not tensor.numel() or tensor.is_meta
    except RuntimeError:
        return False


def _fits(given: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    if len(given) != len(shape):
        return False
    for want, size in zip(shape, given, strict=True):  # in a loop, which is faster than all()
        if want != size and want is not None:
            return False
    return True
