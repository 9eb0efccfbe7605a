"""The BSR formats: which KV tokens each query token of a batch may see.

The KV cache is a block-sparse matrix in block sparse row (BSR) form. A block row is a request: the
query tokens ``qo_indptr[b]:qo_indptr[b+1]``. Its blocks are pages, named by
``kv_indices[kv_indptr[b]:kv_indptr[b+1]]`` in KV order; all are full but the last, which holds
``kv_last_page_len[b]`` tokens. A page table, a block mask and a token tree are all of this form;
ragged K/V is the same without the indirection, where ``kv_indptr`` counts tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tvm_attn._bsr_text import picture
from tvm_attn._index_arrays import (
    IndexArray,
    checked_size,
    index_array,
    optional_index_array,
    param_arrays,
)
from tvm_attn._index_arrays import as_tensor as as_tensor
from tvm_attn._index_arrays import check_strided as check_strided
from tvm_attn.errors import DTypeError, PlanError, ShapeError
from tvm_attn.spec import integer


@dataclass(frozen=True, eq=False)
class BSR:
    """One attention access structure: the query and KV tokens of each request of a batch.

    Made by a ``from_`` constructor, which accepts torch tensors, numpy arrays and Python lists of
    int32 or int64. An int32 array is borrowed, not copied. Shapes, dtypes and devices are checked
    here, the values of the arrays by `plan`.

    Parameters
    ----------
    qo_indptr : torch.Tensor
        ``[batch + 1]`` int32, first query token of each request, and their number.
    kv_indptr : torch.Tensor
        ``[batch + 1]`` int32, into `kv_indices`; for ragged K/V into the tokens of K and V.
    kv_indices : torch.Tensor or None
        ``[num_blocks]`` int32, page ids of each request in KV order; None means ragged.
    kv_last_page_len : torch.Tensor or None
        ``[batch]`` int32, tokens in the last page of each request, 1 to `page_size` (of no
        meaning for a request without pages); None means ragged.
    page_size : int or None
        Tokens per page; None means ragged.
    q_pos_offset, kv_pos_offset : torch.Tensor or None
        ``[batch]`` int32, position of the first query and the first key of each request; None
        means ``kv_len - qo_len`` and 0.
    index_params : dict of str to torch.Tensor
        Per-batch arrays of a variant, such as the bits of a custom mask.
    num_col_blocks : int or None
        Column blocks of the whole matrix where they are known (block masks): for printing.

    Raises
    ------
    DTypeError
        If an array is neither int32 nor int64, or `page_size` is no integer.
    ShapeError
        If lengths or devices disagree, or only part of a page table is given.
    PlanError
        If a size is below 1, or a value does not fit int32.

    Examples
    --------
    >>> print(BSR.from_page_table([0, 1, 6], [0, 1, 4], [2, 7, 3, 9], [16, 12], page_size=16))
    BSR: batch 2, 6 query tokens, 60 KV tokens, 4 pages of 16
      req 0  q 1  kv 16 | p2
      req 1  q 5  kv 44 | p7 p3 p9:12/16
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor | None = None
    kv_last_page_len: torch.Tensor | None = None
    page_size: int | None = None
    q_pos_offset: torch.Tensor | None = None
    kv_pos_offset: torch.Tensor | None = None
    index_params: Mapping[str, torch.Tensor] = field(default_factory=dict)
    num_col_blocks: int | None = None

    def __post_init__(self) -> None:
        """Check that the arrays are int32, have the lengths of one batch and share a device."""
        page_table = ("kv_indices", "kv_last_page_len", "page_size")
        missing = [name for name in page_table if getattr(self, name) is None]
        if missing and len(missing) < len(page_table):
            raise ShapeError(
                f"a page table needs {', '.join(page_table)}; missing: {', '.join(missing)} "
                "(leave all three out for ragged K/V)"
            )
        self._check_array("qo_indptr", None)
        if self.qo_indptr.shape[0] == 0:
            raise ShapeError("qo_indptr is empty; an empty batch is [0]")
        self._check_array("kv_indptr", self.batch_size + 1)
        self._check_array("kv_indices", None)
        for name in ("kv_last_page_len", "q_pos_offset", "kv_pos_offset"):
            self._check_array(name, self.batch_size)
        for name, array in self.index_params.items():
            self._check_device(name, array)

    def _check_array(self, name: str, length: int | None) -> None:
        array = getattr(self, name)
        if array is None:
            return
        if not isinstance(array, torch.Tensor) or array.dtype != torch.int32:
            raise DTypeError(f"{name} is no int32 tensor; a from_ constructor converts it")
        if length is not None and array.shape[0] != length:
            raise ShapeError(
                f"{name} has {array.shape[0]} entries; a batch of {self.batch_size} requests "
                f"(len(qo_indptr) - 1) needs {length}"
            )
        self._check_device(name, array)

    def _check_device(self, name: str, array: torch.Tensor) -> None:
        if array.device != self.qo_indptr.device:
            raise ShapeError(
                f"{name} is on {array.device}, qo_indptr on {self.qo_indptr.device}; "
                "move them to one device"
            )

    def with_positions(
        self, q_pos_offset: IndexArray | None = None, kv_pos_offset: IndexArray | None = None
    ) -> BSR:
        """Return this format with other position offsets; None keeps what it has."""
        if q_pos_offset is None and kv_pos_offset is None:
            return self
        q_given = optional_index_array(q_pos_offset, "q_pos_offset")
        kv_given = optional_index_array(kv_pos_offset, "kv_pos_offset")
        return replace(
            self,
            q_pos_offset=self.q_pos_offset if q_given is None else q_given,
            kv_pos_offset=self.kv_pos_offset if kv_given is None else kv_given,
        )

    @classmethod
    def from_page_table(
        cls,
        qo_indptr: IndexArray,
        kv_indptr: IndexArray,
        kv_indices: IndexArray,
        kv_last_page_len: IndexArray,
        page_size: int,
        *,
        q_pos_offset: IndexArray | None = None,
        kv_pos_offset: IndexArray | None = None,
        index_params: Mapping[str, Any] | None = None,
    ) -> BSR:
        """Return the format of a paged KV cache; parameters and errors are the class's."""
        return cls(
            qo_indptr=index_array(qo_indptr, "qo_indptr"),
            kv_indptr=index_array(kv_indptr, "kv_indptr"),
            kv_indices=index_array(kv_indices, "kv_indices"),
            kv_last_page_len=index_array(kv_last_page_len, "kv_last_page_len"),
            page_size=checked_size(page_size, "page_size"),
            q_pos_offset=optional_index_array(q_pos_offset, "q_pos_offset"),
            kv_pos_offset=optional_index_array(kv_pos_offset, "kv_pos_offset"),
            index_params=param_arrays(index_params),
        )

    @classmethod
    def of_plain(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_last_page_len: torch.Tensor,
        page_size: int,
    ) -> BSR | None:
        """Return the format of a page table of int32 tensors on the host, None if it is another.

        What most batches are, at a fraction of the time that it takes to look at all there may be.
        Whether all are there, vectors, contiguous and of one length, is left to who reads them.
        """
        if qo_indptr.numel() != kv_last_page_len.numel() + 1:
            return None
        fields = {  # the others have their defaults, which are the class's
            "qo_indptr": qo_indptr,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
            "kv_last_page_len": kv_last_page_len,
            "page_size": page_size,
            "index_params": {},
        }
        made = object.__new__(cls)
        object.__setattr__(made, "__dict__", fields)
        return made

    @classmethod
    def from_ragged(
        cls,
        qo_indptr: IndexArray,
        kv_indptr: IndexArray,
        *,
        q_pos_offset: IndexArray | None = None,
        kv_pos_offset: IndexArray | None = None,
        index_params: Mapping[str, Any] | None = None,
    ) -> BSR:
        """Return the format of ragged K/V; parameters and errors are the class's."""
        return cls(
            qo_indptr=index_array(qo_indptr, "qo_indptr"),
            kv_indptr=index_array(kv_indptr, "kv_indptr"),
            q_pos_offset=optional_index_array(q_pos_offset, "q_pos_offset"),
            kv_pos_offset=optional_index_array(kv_pos_offset, "kv_pos_offset"),
            index_params=param_arrays(index_params),
        )

    @classmethod
    def from_block_mask(
        cls,
        mask: torch.Tensor | npt.NDArray[np.bool_] | Sequence[Sequence[bool]],
        row_block: int,
        col_block: int,
        *,
        qo_len: int | None = None,
        kv_len: int | None = None,
    ) -> BSR:
        """Return the format of a block mask over one sequence of queries and one of keys.

        Each row block becomes a request, each column block a page of contiguous K/V. The storage
        of K/V has whole blocks; with a partial last one, what its padding holds is never read.

        Positions count the keys that a row keeps, as if its blocks were adjacent and the last of
        them ended at its last query. Causal is therefore exact for self-attention with square
        blocks whose rows end at the diagonal; other rules of position belong in the block mask.

        Parameters
        ----------
        mask : array of bool
            ``[num_row_blocks, num_col_blocks]``, True where the row sees the column.
        row_block, col_block : int
            Query tokens of a row block and KV tokens of a column block.
        qo_len, kv_len : int or None
            Query and KV tokens in all, where the last row or column block is partial.

        Raises
        ------
        DTypeError
            If `mask` is not bool.
        ShapeError
            If `mask` is not 2-D.
        PlanError
            If a block size is below 1, or a length does not end in the last block.
        """
        blocks = as_tensor(mask, "mask")
        if blocks.ndim != 2:
            raise ShapeError(f"mask must be [row blocks, column blocks], got {blocks.ndim}-D")
        if blocks.dtype != torch.bool and blocks.numel():
            raise DTypeError(f"mask has dtype {blocks.dtype}; convert it to bool")
        num_rows, num_cols = blocks.shape
        rows = _blocked_length(num_rows, checked_size(row_block, "row_block"), qo_len, "qo_len")
        cols = _blocked_length(num_cols, checked_size(col_block, "col_block"), kv_len, "kv_len")
        starts = torch.arange(num_rows + 1, dtype=torch.int64, device=blocks.device) * row_block
        ends = blocks.sum(dim=1).cumsum(dim=0)
        ends_whole = ~blocks[:, -1:].any(dim=1)
        tail = cols - (num_cols - 1) * col_block
        return cls(
            qo_indptr=index_array(starts.clamp(max=rows), "qo_len"),
            kv_indptr=index_array(torch.cat([ends.new_zeros(1), ends]), "mask"),
            kv_indices=blocks.nonzero()[:, 1].to(torch.int32),
            kv_last_page_len=torch.where(ends_whole, col_block, tail).to(torch.int32),
            page_size=int(col_block),
            num_col_blocks=num_cols,
        )

    @classmethod
    def from_token_tree(
        cls,
        parents: Sequence[IndexArray],
        kv_indptr: IndexArray,
        kv_indices: IndexArray | None = None,
        kv_last_page_len: IndexArray | None = None,
        page_size: int | None = None,
    ) -> BSR:
        """Return the format of speculative decoding: each request verifies a tree of draft tokens.

        The queries of a request are the nodes of its tree. Their K/V are its last keys, appended
        after the prefix in the same order. A node sees the whole prefix, its ancestors and itself:
        ``index_params["custom_mask"]`` says so, and the variant is `custom_mask` alone. The mask is
        built on the host, for which arrays on a device are copied.

        Positions follow the order of storage (node ``i`` is at ``prefix_len + i``), not the depth
        in the tree, which no offset can express. Rotate queries and keys by depth beforehand, and
        leave rules of position (causal, window, ALiBi) out of the variant.

        Parameters
        ----------
        parents : sequence of arrays
            Per request, the parent of each node as an index into the same tree, -1 for a root. A
            parent comes before its children.
        kv_indptr, kv_indices, kv_last_page_len, page_size
            The page table of prefix and tree together, or `kv_indptr` alone for ragged K/V.

        Raises
        ------
        PlanError
            If a parent does not come before its child, or a request has fewer keys than nodes.
        """
        trees = [index_array(tree, f"parents[{b}]").cpu() for b, tree in enumerate(parents)]
        indptr = index_array(kv_indptr, "kv_indptr")
        if len(trees) + 1 != len(indptr):
            raise ShapeError(f"{len(trees)} trees in parents, {len(indptr) - 1} rows in kv_indptr")
        nodes = torch.tensor([0, *accumulate(map(len, trees))], device="cpu")
        fmt = cls(
            qo_indptr=nodes.to(indptr.device, torch.int32),
            kv_indptr=indptr,
            kv_indices=optional_index_array(kv_indices, "kv_indices"),
            kv_last_page_len=optional_index_array(kv_last_page_len, "kv_last_page_len"),
            page_size=None if page_size is None else checked_size(page_size, "page_size"),
        )
        masks = [
            _tree_mask(tree.numpy(), kv_len, request).ravel()
            for request, (tree, kv_len) in enumerate(zip(trees, fmt.kv_len.tolist(), strict=True))
        ]
        mask = torch.from_numpy(np.concatenate(masks) if masks else np.zeros(0, bool))
        return replace(fmt, index_params={"custom_mask": mask.to(indptr.device)})

    @property
    def batch_size(self) -> int:
        """Number of requests."""
        return self.qo_indptr.shape[0] - 1

    @property
    def nnz_qo(self) -> int:
        """Query tokens of the whole batch (synchronises when the arrays are on a device)."""
        return int(self.qo_indptr[-1])

    @property
    def num_blocks(self) -> int:
        """Blocks of all rows: pages, or tokens where K/V is ragged (synchronises on a device)."""
        return int(self.kv_indptr[-1])

    @property
    def qo_len(self) -> torch.Tensor:
        """``[batch]`` int64, query tokens of each request."""
        return self.qo_indptr.to(torch.int64).diff()

    @property
    def kv_len(self) -> torch.Tensor:
        """``[batch]`` int64, KV tokens of each request; 0 where it has no pages."""
        blocks = self.kv_indptr.to(torch.int64).diff()
        if self.page_size is None or self.kv_last_page_len is None:
            return blocks
        tokens = (blocks - 1) * self.page_size + self.kv_last_page_len
        return torch.where(blocks > 0, tokens, 0)

    def __str__(self) -> str:
        """Return a picture: a line about the batch, then its requests or its block mask."""
        return picture(self)


def _blocked_length(num_blocks: int, block: int, length: int | None, name: str) -> int:
    """Return the tokens of `num_blocks` blocks, the last of which `length` may cut short."""
    whole = num_blocks * block
    if length is None:
        return whole
    if integer(length) is None:
        raise DTypeError(f"{name}={length!r} must be an integer, or None")
    if not max(whole - block, -1) < length <= whole:
        raise PlanError(
            f"{name}={length} does not end in the last of {num_blocks} blocks of {block}; "
            f"it must be in {max(whole - block + 1, 0)}..{whole}"
        )
    return length


def _tree_mask(parents: npt.NDArray[np.int32], kv_len: int, request: int) -> npt.NDArray[np.bool_]:
    """Return ``[nodes, kv_len]``: the prefix, then each node's ancestors and the node itself."""
    nodes = len(parents)
    if nodes > kv_len:
        raise PlanError(
            f"parents[{request}] has {nodes} nodes, but its request only {kv_len} KV tokens; "
            "the tree's own tokens are the last of them"
        )
    mask = np.ones((nodes, kv_len), dtype=bool)
    tree = mask[:, kv_len - nodes :]
    tree[:] = np.eye(nodes, dtype=bool)
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise PlanError(
                f"parents[{request}][{node}] is {parent}; a parent comes before its child "
                f"(0..{node - 1}) or is -1 for a root"
            )
        if parent >= 0:
            tree[node] |= tree[parent]
    return mask
