"""What attention should give: a float64 oracle, torch eager, and the promise that ties us to them.

For tests, notebooks, benchmarks and the demo; torch only. `attention` computes one request,
`batch_attention` a batch in any BSR format, in one of two ways:

- ``compute="float64"``: everything in float64, exact for our purposes.
- ``compute="eager"``: as torch eager does it. Matmuls of operands in the dtype of q accumulate in
  float32, where the scores stay; softmax is in float32; the probabilities are cast to the dtype of
  q, the result to the output dtype. Quantised K and V are dequantised to the dtype of q first.

`check_accuracy` holds a result against both. The torch twins of the variants (`causal`, `soft_cap`,
...) serve as ``mask=`` and ``logits=``; ``&`` composes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tvm_attn._twins import (
    Logits,
    LogitsFn,
    Mask,
    MaskFn,
    alibi,
    alibi_slopes,
    causal,
    custom_mask,
    of_request,
    sigmoid,
    sliding_window,
    soft_cap,
)
from tvm_attn.bsr import BSR
from tvm_attn.errors import ShapeError, SpecError

__all__ = [
    "Accuracy",
    "KVCache",
    "Logits",
    "LogitsFn",
    "Mask",
    "MaskFn",
    "Scale",
    "alibi",
    "alibi_slopes",
    "attention",
    "batch_attention",
    "causal",
    "check_accuracy",
    "custom_mask",
    "error_bound",
    "gather",
    "sigmoid",
    "sliding_window",
    "soft_cap",
]

KVCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""A pair (k, v), or a fused cache ``[num_pages, 2, ...]``."""
Scale = float | torch.Tensor | None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    sm_scale: float | None = None,
    logits: LogitsFn | None = None,
    mask: MaskFn | None = None,
    q_pos: torch.Tensor | None = None,
    kv_pos: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    use_softmax: bool = True,
    compute: str = "float64",
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out ``[qo_len, num_qo_heads, head_dim_vo]`` and base 2 lse of one request.

    A query row with no visible key gives out 0 and lse -inf.

    Parameters
    ----------
    q, k, v : torch.Tensor
        ``[qo_len, num_qo_heads, head_dim_qk]``, ``[kv_len, num_kv_heads, head_dim_qk]`` and
        ``[kv_len, num_kv_heads, head_dim_vo]``.
    sm_scale : float, optional
        Scale of the logits, by default ``1 / sqrt(head_dim_qk)``.
    logits, mask : callable, optional
        See `LogitsFn` (``s`` is already scaled) and `MaskFn`.
    q_pos, kv_pos : torch.Tensor, optional
        Positions ``[qo_len]`` and ``[kv_len]``, by default ``kv_len - qo_len`` and on, 0 and on.
    sink : torch.Tensor, optional
        ``[num_qo_heads]``; adds ``exp(sink)`` to the denominator of each row, once.
    use_softmax : bool
        If False, the logits weigh the values as they are, and lse is None.
    compute : {"float64", "eager"}
        See the module.
    out_dtype : torch.dtype, optional
        Dtype of an eager out, by default that of `q`; an eager lse is float32.
    """
    if compute not in ("float64", "eager"):
        raise SpecError(f'compute={compute!r} must be "float64" or "eager"')
    if q.shape[1] % k.shape[1]:
        raise ShapeError(f"q has {q.shape[1]} heads, no multiple of the {k.shape[1]} of k")
    exact = compute == "float64"
    operand, accumulator = (torch.float64, torch.float64) if exact else (q.dtype, torch.float32)
    q, k, v = (x.to(operand).to(accumulator) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[2]) if sm_scale is None else sm_scale
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores, visible = _transform(scores, logits, mask, q_pos, kv_pos)
    if use_softmax:
        weights, lse = _softmax(scores.masked_fill(~visible, -math.inf), sink)
    else:
        weights, lse = scores.masked_fill(~visible, 0), None
    out = torch.einsum("hqk,khd->qhd", weights.to(operand).to(accumulator), v)
    return out if exact else out.to(out_dtype or operand), lse


def _transform(
    scores: torch.Tensor,
    logits: LogitsFn | None,
    mask: MaskFn | None,
    q_pos: torch.Tensor | None,
    kv_pos: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the hooks to scores ``[head, qo, kv]``; also return which of them are visible."""
    heads, qo_len, kv_len = scores.shape
    head = torch.arange(heads, device=scores.device)[:, None, None]
    q_idx = torch.arange(qo_len, device=scores.device)[:, None]
    kv_idx = torch.arange(kv_len, device=scores.device)[None, :]
    q_pos = q_idx + kv_len - qo_len if q_pos is None else q_pos.view(-1, 1)
    kv_pos = kv_idx if kv_pos is None else kv_pos.view(1, -1)
    if logits is not None:
        scores = logits(scores, q_pos, kv_pos, head)
    visible = torch.ones_like(scores, dtype=torch.bool)
    if mask is not None:
        visible = visible & mask(q_idx, kv_idx, q_pos, kv_pos)
    return scores, visible


def _softmax(scores: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities ``[head, qo, kv]`` and the base 2 log-sum-exp ``[qo, head]``."""
    empty = (scores == -math.inf).all(dim=-1)
    columns = scores
    if sink is not None:
        column = sink.to(scores).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        columns = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(columns, dim=-1)[..., : scores.shape[-1]]
    lse = torch.logsumexp(columns, dim=-1) / math.log(2)
    return weights.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -math.inf).T


def gather(
    kv: KVCache, fmt: BSR, request: int, *, kv_layout: str = "NHD"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the dense K and V ``[kv_len, num_kv_heads, head_dim]`` of a request.

    Parameters
    ----------
    kv : tuple of torch.Tensor, or torch.Tensor
        K and V, or a fused 5-D cache. ``NHD`` pages are ``[page_size, num_kv_heads, head_dim]``,
        ``HND`` pages ``[num_kv_heads, page_size, head_dim]``; ragged K/V is without the pages.
    fmt : BSR
        The format that names the pages or tokens of the request.
    request : int
        Which request of the batch.
    kv_layout : {"NHD", "HND"}
        Order of token and head.
    """
    begin, end = fmt.kv_indptr[request : request + 2].tolist()
    kv_len = int(fmt.kv_len[request])

    def dense(cache: torch.Tensor) -> torch.Tensor:
        by_token = cache if kv_layout == "NHD" else cache.transpose(-3, -2)
        if fmt.kv_indices is None:
            return by_token[begin:end]
        pages = by_token[fmt.kv_indices[begin:end].long()]
        return pages.flatten(0, 1)[:kv_len]

    k_cache, v_cache = kv.unbind(1) if isinstance(kv, torch.Tensor) else kv
    return dense(k_cache), dense(v_cache)


def batch_attention(
    q: torch.Tensor,
    kv: KVCache,
    fmt: BSR,
    *,
    kv_layout: str = "NHD",
    k_scale: Scale = None,
    v_scale: Scale = None,
    logits: LogitsFn | None = None,
    mask: MaskFn | None = None,
    use_softmax: bool = True,
    compute: str = "float64",
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `attention` of a batch: out ``[nnz_qo, num_qo_heads, head_dim_vo]`` and base 2 lse.

    Parameters
    ----------
    q : torch.Tensor
        ``[nnz_qo, num_qo_heads, head_dim_qk]``.
    kv, kv_layout
        See `gather`.
    fmt : BSR
        The batch; its position offsets are honoured.
    k_scale, v_scale : float or torch.Tensor, optional
        What the stored K and V are multiplied by (dequantisation), or ``[num_kv_heads]`` of it.
    logits, mask : callable, optional
        One that differs from request to request has a method ``at(request)`` that returns the
        callable of that request.
    use_softmax, compute, out_dtype, **options
        As for `attention`; options are ``sm_scale`` and ``sink``.
    """
    exact = compute == "float64"
    v_dim = (kv if isinstance(kv, torch.Tensor) else kv[1]).shape[-1]
    dtype = torch.float64 if exact else out_dtype or q.dtype
    out = q.new_zeros((*q.shape[:2], v_dim), dtype=dtype)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.float64 if exact else torch.float32)
    for b in range(fmt.batch_size):
        rows = slice(*fmt.qo_indptr[b : b + 2].tolist())
        k, v = gather(kv, fmt, b, kv_layout=kv_layout)
        q_pos, kv_pos = _positions(fmt, b)
        out[rows], of_rows = attention(
            q[rows],
            _dequantise(k, k_scale, q.dtype, compute),
            _dequantise(v, v_scale, q.dtype, compute),
            logits=None if logits is None else of_request(logits, b),
            mask=None if mask is None else of_request(mask, b),
            q_pos=q_pos.to(q.device),
            kv_pos=kv_pos.to(q.device),
            use_softmax=use_softmax,
            compute=compute,
            out_dtype=out_dtype,
            **options,
        )
        if of_rows is not None:
            lse[rows] = of_rows
    return out, lse if use_softmax else None


def _positions(fmt: BSR, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of the queries and of the keys of a request."""
    qo_len, kv_len = int(fmt.qo_len[request]), int(fmt.kv_len[request])
    q_first = kv_len - qo_len if fmt.q_pos_offset is None else int(fmt.q_pos_offset[request])
    kv_first = 0 if fmt.kv_pos_offset is None else int(fmt.kv_pos_offset[request])
    return torch.arange(q_first, q_first + qo_len), torch.arange(kv_first, kv_first + kv_len)


def _dequantise(x: torch.Tensor, scale: Scale, dtype: torch.dtype, compute: str) -> torch.Tensor:
    """Return `x` times its scale: exactly, or rounded to `dtype` for torch eager."""
    wide = x.to(torch.float64 if compute == "float64" else torch.float32)
    if scale is not None:
        per_head = torch.as_tensor(scale, device=x.device).to(wide).view(-1, 1)
        wide = wide * per_head
    return wide if compute == "float64" else wide.to(dtype)


@dataclass(frozen=True)
class Accuracy:
    """Error of a result against float64, and what torch eager's error allows it to be.

    Parameters
    ----------
    name : str
        What was measured.
    max_error, rms_error : float
        Largest and root mean square difference from float64.
    max_bound, rms_bound : float
        Twice those of torch eager, plus two ulp at the largest and at the root mean square output.
    """

    name: str
    max_error: float
    max_bound: float
    rms_error: float
    rms_bound: float

    @property
    def ratio(self) -> float:
        """Error as a part of its bound, of the norm that is closer to it: at most 1."""
        return max(self.max_error / self.max_bound, self.rms_error / self.rms_bound)

    def __str__(self) -> str:
        """Return one line with both errors and both bounds."""
        return (
            f"{self.name}: max error {self.max_error:.2e} (bound {self.max_bound:.2e}), "
            f"rms {self.rms_error:.2e} (bound {self.rms_bound:.2e}), {self.ratio:.0%} of the bound"
        )


def error_bound(
    got: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor, *, name: str = "out"
) -> Accuracy:
    """Measure `got` and `eager` against `exact`, over the entries that are finite in `exact`.

    Parameters
    ----------
    got, eager : torch.Tensor
        A result, and torch eager's in the same dtype, whose ulp counts.
    exact : torch.Tensor
        The same in float64.
    name : str
        What the message calls it.
    """
    finite = exact.isfinite()
    truth = exact[finite]
    max_error, rms_error = _norms(got[finite].double() - truth)
    max_eager, rms_eager = _norms(eager[finite].double() - truth)
    max_ulp, rms_ulp = (_ulp(magnitude, eager.dtype) for magnitude in _norms(truth))
    return Accuracy(
        name, max_error, 2 * (max_eager + max_ulp), rms_error, 2 * (rms_eager + rms_ulp)
    )


def check_accuracy(
    got: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor, *, name: str = "out"
) -> Accuracy:
    """Return `error_bound`, or fail where `got` is not what is promised.

    Beyond the bound, rows of zeros (out) and entries of -inf (lse), which are what a query without
    visible keys gets, must be matched exactly, and nothing else may be infinite or NaN.

    Raises
    ------
    AssertionError
        With the errors, the bounds and the worst entry.
    """
    if (got.shape, got.dtype) != (eager.shape, eager.dtype):
        raise AssertionError(
            f"{name} is {got.dtype} {tuple(got.shape)}, not {eager.dtype} {tuple(eager.shape)}"
        )
    exact, eager = exact.to(got.device), eager.to(got.device)
    empty = (exact == -math.inf) | (exact == 0).all(-1, keepdim=True)
    wrong = torch.where(empty, got != exact.to(got.dtype), ~got.isfinite())
    measured = error_bound(got, exact, eager, name=name)
    if wrong.any():
        entry = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}{list(entry)} is {got[entry].item()}, not {exact[entry].item():.6g} "
            f"({int(wrong.sum())} entries are not finite, or not exactly empty)"
        )
    if not (measured.ratio <= 1 and math.isfinite(measured.max_bound)):
        error = (got.double() - exact).abs().masked_fill(empty, 0)
        entry = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        raise AssertionError(
            f"{measured}; worst is {list(entry)}: {got[entry].item():.6g}, in float64 "
            f"{exact[entry].item():.6g}, by torch eager {eager[entry].item():.6g}"
        )
    return measured


def _norms(x: torch.Tensor) -> tuple[float, float]:
    if not x.numel():
        return 0.0, 0.0
    return float(x.abs().max()), float(x.square().mean().sqrt())


def _ulp(magnitude: float, dtype: torch.dtype) -> float:
    """Return the distance of neighbouring numbers of `dtype` at a magnitude."""
    info = torch.finfo(dtype)
    exponent = math.frexp(max(magnitude, info.smallest_normal))[1] - 1
    return math.ldexp(info.eps, exponent)
