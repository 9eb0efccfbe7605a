"""One prefill beside a batch of decoding, under FlashInfer's names.

See ``docs/flashinfer.md`` for what differs from flashinfer-python 0.7.4.
"""

from __future__ import annotations

from typing import Any

import torch

from tvm_attn._flashinfer.arguments import (
    IndexArray,
    KVCache,
    Result,
    Scale,
    check_buffer,
    implemented_except,
)
from tvm_attn._flashinfer.decode_paged import BatchDecodeWithPagedKVCacheWrapper
from tvm_attn._flashinfer.options import Options, mask_of, plan_once, run_once
from tvm_attn.errors import PlanError
from tvm_attn.runtime.beside import side_by_side
from tvm_attn.runtime.device import on_device
from tvm_attn.runtime.module import AttentionModule
from tvm_attn.runtime.partition import overlaps, queues_beside
from tvm_attn.runtime.plan import Plan

Request = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k and v."""
DEFAULTS: dict[str, Any] = {
    "kv_layout_d": "NHD",
    "pos_encoding_mode_d": "NONE",
    "sm_scale_d": None,
    "window_left_d": -1,
}
"""Options of the batch that a run may repeat."""


class PODWithPagedKVCacheWrapper:
    """Attention of one request's prefill and of a batch of decoding, side by side on a GPU.

    The batch is planned as by `BatchDecodeWithPagedKVCacheWrapper`; the prefill comes with each
    run, with keys and values that are not paged.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        Not used, but on the device of the tensors.
    kv_layout : {"NHD", "HND"}
        Layout of the pages.
    use_cuda_graph : bool
        Copy every plan into the buffers below, which bound the batch.
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer : torch.Tensor
        int32 ``[max_batch + 1]``, ``[max_pages]`` and ``[max_batch]``, with `use_cuda_graph`.

    Raises
    ------
    DTypeError, ShapeError, SpecError
        If an argument is wrong; the message names it.
    """

    @implemented_except("jit_args")
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        jit_args: list[Any] | None = None,
    ) -> None:
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            paged_kv_indptr_buffer=paged_kv_indptr_buffer,
            paged_kv_indices_buffer=paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
        )
        self._decode.called = type(self).__name__
        self._planned = {**DEFAULTS, "kv_layout_d": kv_layout}
        self._prefill: Plan | None = None
        self._beside: tuple[AttentionModule, Plan] | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans are copied into buffers of the caller's, which bound the batch."""
        return self._decode.is_cuda_graph_enabled

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Accept other workspace memory.

        Parameters
        ----------
        float_workspace_buffer, int_workspace_buffer : torch.Tensor
            Any tensors.

        Raises
        ------
        DTypeError
            If one is no tensor.
        """
        self._decode.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    @implemented_except("rope_scale", "rope_theta")
    def plan(
        self,
        indptr: IndexArray,
        indices: IndexArray,
        last_page_len: IndexArray,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Plan the batch of decoding.

        Parameters
        ----------
        indptr, indices, last_page_len : array
            int32 or int64 page table: ``[batch + 1]``, ``[num_pages]`` and ``[batch]``. What is on
            a GPU is copied to the host, which waits for the GPU.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
            Shape of the problem.
        pos_encoding_mode, window_left, sm_scale
            As for `single_decode_with_kv_cache`.
        q_data_type, kv_data_type, data_type : torch.dtype or str, optional
            Dtypes of q, and of K and V (that of q); `data_type` stands in for those that are None.
        non_blocking : bool
            Has no effect.

        Raises
        ------
        PlanError, LimitError, SpecError, ShapeError, DTypeError
            If an argument is wrong; the message names it, and the earlier plan stays.
        """
        self._decode.plan(
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            data_type=data_type,
            sm_scale=sm_scale,
        )
        self._planned |= {
            "pos_encoding_mode_d": pos_encoding_mode,
            "window_left_d": window_left,
            "sm_scale_d": sm_scale,
        }

    begin_forward = plan

    @implemented_except(
        "rope_scale_p", "rope_theta_p", "custom_mask_d", "packed_custom_mask_d", "rope_scale_d",
        "rope_theta_d", "use_fp16_qk_reduction", "args",
    )  # fmt: skip
    def run(
        self,
        q_p: torch.Tensor,
        k_p: torch.Tensor,
        v_p: torch.Tensor,
        q_d: torch.Tensor,
        paged_kv_cache_d: KVCache,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: torch.Tensor | None = None,
        packed_custom_mask_d: torch.Tensor | None = None,
        causal_d: bool = False,
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: float | None = None,
        window_left_d: int = -1,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: float | None = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *args: Any,
    ) -> tuple[Result, Result]:
        """Compute attention of a prefill, and of the planned batch of decoding.

        Parameters
        ----------
        q_p, k_p, v_p : torch.Tensor
            Of the prefill, as for `single_prefill_with_kv_cache`.
        q_d, paged_kv_cache_d
            Of the batch, as for `BatchDecodeWithPagedKVCacheWrapper.run`.
        custom_mask_p, packed_custom_mask_p, causal_p, kv_layout_p, pos_encoding_mode_p, sm_scale_p,
        window_left_p, return_lse_p
            Options of the prefill, as for `single_prefill_with_kv_cache`.
        kv_layout_d, pos_encoding_mode_d, sm_scale_d, window_left_d
            Options of the batch: those of the constructor and of the plan.
        causal_d : bool
            Has no effect on one query token, the last.
        q_scale, k_scale, v_scale : float or torch.Tensor, optional
            What q, k and v of the batch are multiplied by.
        return_lse_d : bool
            Have the batch's result be ``(out, lse)``.
        enable_pdl : bool, optional
            Has no effect.

        Returns
        -------
        tuple
            Of the prefill and of the batch: out, or ``(out, lse)`` with its ``return_lse``.

        Raises
        ------
        ShapeError, DTypeError, SpecError, PlanError
            If an argument does not fit the plan; the message names it.
        """
        self._check_options(
            kv_layout_d=kv_layout_d,
            pos_encoding_mode_d=pos_encoding_mode_d,
            sm_scale_d=sm_scale_d,
            window_left_d=window_left_d,
        )
        options = Options(
            causal=causal_p,
            window_left=window_left_p,
            pos_encoding_mode=pos_encoding_mode_p,
            sm_scale=sm_scale_p,
            custom_mask=mask_of(custom_mask_p, packed_custom_mask_p),
        )
        request: Request = (q_p, k_p, v_p)
        kernel, plan = self._plan_prefill(request, kv_layout_p, options)
        out_d = torch.empty_like(check_buffer(q_d, "q_d"))
        given: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        given["lse"] = q_d.new_empty(q_d.shape[:2], dtype=torch.float32)
        return side_by_side(
            self._decode.device,
            lambda: run_once(kernel, plan, *request, options, return_lse=return_lse_p),
            lambda: self._decode.run(
                q_d, paged_kv_cache_d, out=out_d, return_lse=return_lse_d, **given
            ),
        )

    def _plan_prefill(
        self, request: Request, kv_layout: str, options: Options
    ) -> tuple[AttentionModule, Plan]:
        """Return the kernel and the plan of the prefill: those of the run before, if they serve."""
        kernel, plan = plan_once(*request, kv_layout, options, held=self._prefill)
        if plan is not self._prefill:
            self._prefill, self._beside = plan, self._leave_room(kernel, plan, options)
        return self._beside or (kernel, plan)

    def _leave_room(
        self, kernel: AttentionModule, plan: Plan, options: Options
    ) -> tuple[AttentionModule, Plan] | None:
        """Return the prefill dealt to fewer CTAs, if that is faster beside the planned batch."""
        works = plan.work, self._decode.work_lists()
        if options.custom_mask is not None or [len(lists) for lists in works] != [1, 1]:
            return None
        [work], [decoding] = works
        if not overlaps(work.family, decoding.family):
            return None
        queues = queues_beside(work, decoding)
        if queues == work.num_ctas:
            return None
        fewer = kernel.with_ctas(queues)
        indptrs = map(torch.from_numpy, plan.batch[:2])
        with on_device(self._decode.device):
            return fewer, fewer.plan(*indptrs, **options.plan_params())

    def _check_options(self, **given: Any) -> None:
        """Raise `PlanError` if an option is neither its default nor what was planned."""
        for name, value in given.items():
            planned = self._planned[name]
            if value not in (DEFAULTS[name], planned):
                raise PlanError(
                    f"{name}={value!r}, but the batch was planned with {planned!r}; give it to "
                    "plan(), or kv_layout to the constructor"
                )
