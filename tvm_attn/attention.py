"""Attention of mixed batches, under FlashInfer's names: prefill and decode requests in one run.

See ``docs/flashinfer.md`` for what differs from flashinfer-python 0.7.4.
"""

from __future__ import annotations

import torch

from tvm_attn._flashinfer.arguments import (
    IndexArray,
    KVCache,
    Scale,
    check_stride_variant,
    host_indices,
    implemented_except,
    index_array,
    last_page_len,
    paged_cache,
)
from tvm_attn._flashinfer.options import Options
from tvm_attn._flashinfer.wrapper import Wrapper
from tvm_attn._index_arrays import checked_size
from tvm_attn.errors import PlanError, ShapeError, SpecError


class BatchAttention(Wrapper):
    """Attention of a batch of requests of any lengths with a paged KV cache.

    Parameters
    ----------
    kv_layout : {"NHD", "HND"}
        Layout of the pages.
    device : str
        Device of the tensors: the current GPU, one such as ``"cuda:1"``, or ``"cpu"``.

    Raises
    ------
    SpecError
        If `kv_layout` is no layout, or `device` no device.
    """

    def __init__(self, kv_layout: str = "NHD", device: str = "cuda"):
        try:
            found = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise SpecError(f'device={device!r} is none; give "cuda" or "cpu"') from error
        super().__init__(kv_layout, "auto", found)

    @implemented_except("use_profiler")
    def plan(
        self,
        qo_indptr: IndexArray,
        kv_indptr: IndexArray,
        kv_indices: IndexArray,
        kv_len_arr: IndexArray,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """Plan a batch.

        Parameters
        ----------
        qo_indptr : array
            int32 or int64 ``[batch + 1]``, first query token of each request, and their number.
        kv_indptr, kv_indices : array
            int32 or int64 page table: ``[batch + 1]`` and ``[num_pages]``. A request may have more
            pages than its keys take; those are not read.
        kv_len_arr : array
            int32 or int64 ``[batch]``, KV length of each request. Of all arrays, what is on a GPU
            is copied to the host, which waits for the GPU.
        num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size : int
            Shape of the problem.
        causal : bool
            Whether a token sees no later one; the queries are the last tokens of a request.
        sm_scale : float, optional
            Scale of the logits, ``1 / sqrt(head_dim_qk)`` by default.
        logits_soft_cap : float, optional
            Bound of the logits; None and 0 are none.
        q_data_type, kv_data_type : torch.dtype
            Dtypes of q and out, and of K and V.

        Raises
        ------
        PlanError, SpecError, ShapeError, DTypeError
            If an argument is wrong; the message names it, and the earlier plan stays.
        """
        checked_size(page_size, "page_size")
        qo_indptr, kv_indptr, kv_indices, kv_len_arr = host_indices(
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            kv_len_arr=kv_len_arr,
        )
        heads = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
        spec = self._spec(heads, (q_data_type, kv_data_type, None), page_size)
        self._plan_batch(
            spec,
            Options(causal=causal, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap),
            (qo_indptr, *_page_table(kv_indptr, kv_indices, kv_len_arr, page_size)),
            None,
            int(qo_indptr[-1]),
        )

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Do nothing: every kernel takes K and V of different strides.

        Parameters
        ----------
        variant : str
            ``"independent"``.

        Raises
        ------
        SpecError
            If `variant` is another.
        PlanError
            If there is no plan.
        """
        check_stride_variant(variant)
        self._current()

    @implemented_except("profiler_buffer", "kv_cache_sf")
    def run(
        self,
        q: torch.Tensor,
        kv_cache: KVCache,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: torch.Tensor | None = None,
        kv_cache_sf: KVCache | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention for the planned batch.

        Parameters
        ----------
        q : torch.Tensor
            ``[nnz_qo, num_qo_heads, head_dim_qk]``.
        kv_cache : tuple of torch.Tensor, or torch.Tensor
            ``(k, v)`` of ``[num_pages, page_size, num_kv_heads, head_dim]`` (NHD) or ``[num_pages,
            num_kv_heads, page_size, head_dim]`` (HND), or both in one 5-D tensor with an axis of 2
            after the pages. Pages of one token may be without their axis.
        out, lse : torch.Tensor, optional
            Where to put the results.
        k_scale, v_scale : float or torch.Tensor, optional
            What k and v are multiplied by: a number, or ``[num_kv_heads]``.
        logits_soft_cap : float
            Replaces the plan's, which must have one too; 0 keeps the plan's.

        Returns
        -------
        out, lse : torch.Tensor
            ``[nnz_qo, num_qo_heads, head_dim_vo]``, and ``[nnz_qo, num_qo_heads]`` float32, base 2.

        Raises
        ------
        ShapeError, DTypeError, PlanError
            If an argument does not fit the plan; the message names it.
        """
        kernel, planned = self._current()
        params = self._run_params
        if logits_soft_cap is not None and logits_soft_cap > 0:
            if not self._options.features.soft_cap:
                raise PlanError(
                    f"logits_soft_cap={logits_soft_cap}, but the batch was planned without; "
                    "give it to plan()"
                )
            params = {**params, "logits_soft_cap": logits_soft_cap}
        result = kernel.run(
            planned,
            q,
            paged_cache(kv_cache, self._kv_layout),
            out=out,
            lse=lse,
            return_lse=True,
            k_scale=k_scale,
            v_scale=v_scale,
            **params,
        )
        return result[0], result[1]


def _page_table(
    kv_indptr: IndexArray, kv_indices: IndexArray, kv_len_arr: IndexArray, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return indptr, indices and last_page_len of the pages that KV lengths take of a table."""
    indptr, indices = index_array(kv_indptr, "kv_indptr"), index_array(kv_indices, "kv_indices")
    kv_len = index_array(kv_len_arr, "kv_len_arr")
    pages, last = indptr.diff(), last_page_len(kv_len, page_size)
    if len(pages) != len(kv_len):
        raise ShapeError(f"kv_len_arr has {len(kv_len)} entries, kv_indptr {len(pages)} requests")
    needed = (kv_len.to(torch.int64) + page_size - 1) // page_size
    wrong = (kv_len < 0) | (needed > pages)
    if wrong.any():
        b = int(wrong.nonzero()[0])
        raise PlanError(
            f"kv_len_arr[{b}] is {int(kv_len[b])}; kv_indptr gives the request {int(pages[b])} "
            f"pages of {page_size}"
        )
    needed = needed.to(torch.int32)
    if torch.equal(pages, needed) or int(indptr[0]):  # which the planner refuses
        return indptr, indices, last
    if int(indptr[-1]) > len(indices):
        raise PlanError(
            f"kv_indices has {len(indices)} entries, kv_indptr[-1] asks for {int(indptr[-1])}"
        )
    begins = torch.nn.functional.pad(needed.cumsum(0), (1, 0)).to(torch.int32)
    shift = torch.repeat_interleave(indptr[:-1] - begins[:-1], needed)
    return begins, indices[torch.arange(int(begins[-1]), device="cpu") + shift], last
