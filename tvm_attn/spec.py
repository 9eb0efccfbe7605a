"""What is asked for: an attention problem's shape, and the run-time parameters a kernel takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any, Literal

from tvm_attn.errors import SpecError, VariantError

Q_DTYPES = ("float32", "float16", "bfloat16")
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
LAYOUTS = ("NHD", "HND")
SCALAR_DTYPES = ("float32", "int32", "int64")
PARAM_DTYPES = ("float32", "float16", "bfloat16", "int32", "int64", "uint8")
MAX_HEAD_DIM = 256
MAX_PAGE_SIZE = 2**20


@dataclass(frozen=True)
class AttentionSpec:
    """The shape of an attention problem: heads, head dims, dtypes and KV layout.

    Frozen, hashable, and valid once constructed.

    Parameters
    ----------
    num_qo_heads, num_kv_heads : int
        Query/output heads and KV heads; the first is a multiple of the second (GQA). Only their
        quotient, the group size, is compiled in.
    head_dim_qk, head_dim_vo : int
        Head dim of queries and keys, and of values and outputs: multiples of 16 up to 256.
        ``head_dim_vo=None`` takes ``head_dim_qk``.
    q_dtype, kv_dtype, o_dtype : str
        ``"float32"`` (CPU), ``"float16"`` or ``"bfloat16"``; the KV cache may also be
        ``"float8_e4m3fn"`` or ``"float8_e5m2"``. ``None`` takes ``q_dtype``.
    kv_layout : {"NHD", "HND"}
        Order of (token, head, dim) inside a page, or of ragged K/V.
    page_size : int or None
        Tokens per page of a paged KV cache (at least 1); ``None`` means ragged K/V.

    Raises
    ------
    SpecError
        If a field is out of range; the message names the field and what is allowed.

    Examples
    --------
    >>> spec = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim_qk=128, page_size=16)
    >>> spec.group_size
    4
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int | None = None
    q_dtype: str = "float16"
    kv_dtype: str | None = None
    o_dtype: str | None = None
    kv_layout: str = "NHD"
    page_size: int | None = 16

    def __post_init__(self) -> None:
        """Fill in defaults and validate."""
        for name, default in (
            ("head_dim_vo", self.head_dim_qk),
            ("kv_dtype", self.q_dtype),
            ("o_dtype", self.q_dtype),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        for name in ("q_dtype", "kv_dtype", "o_dtype"):
            object.__setattr__(self, name, dtype_name(getattr(self, name), name))
        for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "page_size"):
            number = integer(getattr(self, name))  # one of numpy's becomes Python's
            object.__setattr__(self, name, getattr(self, name) if number is None else number)
        self._check_heads()
        self._check_head_dims()
        self._check_dtypes()
        if self.kv_layout not in LAYOUTS:
            raise SpecError(f"kv_layout={self.kv_layout!r} is not a layout; use one of {LAYOUTS}")
        if self.page_size is not None and not (
            is_count(self.page_size, 1) and self.page_size <= MAX_PAGE_SIZE
        ):
            raise SpecError(
                f"page_size={self.page_size!r} must be an integer of at least 1 and at most "
                f"{MAX_PAGE_SIZE}, or None for ragged K/V"
            )

    def _check_heads(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads"):
            if not is_count(getattr(self, name), 1):
                raise SpecError(f"{name}={getattr(self, name)!r} must be an integer of at least 1")
        if self.num_qo_heads % self.num_kv_heads:
            raise SpecError(
                f"num_qo_heads={self.num_qo_heads} must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )

    def _check_head_dims(self) -> None:
        for name in ("head_dim_qk", "head_dim_vo"):
            dim = getattr(self, name)
            if not is_count(dim, 16) or dim % 16 or dim > MAX_HEAD_DIM:
                allowed = ", ".join(str(d) for d in range(16, MAX_HEAD_DIM + 1, 16))
                raise SpecError(f"{name}={dim!r} is not supported; use one of {allowed}")

    def _check_dtypes(self) -> None:
        for name in ("q_dtype", "o_dtype"):
            if getattr(self, name) not in Q_DTYPES:
                raise SpecError(f"{name}={getattr(self, name)!r} must be one of {Q_DTYPES}")
        if self.kv_dtype not in (self.q_dtype, *FP8_DTYPES):
            raise SpecError(
                f"kv_dtype={self.kv_dtype!r} must equal q_dtype={self.q_dtype!r} "
                f"or be one of {FP8_DTYPES}"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def is_paged(self) -> bool:
        """Whether K/V live in a page table (else they are ragged)."""
        return self.page_size is not None

    @property
    def dim_vo(self) -> int:
        """`head_dim_vo` as a plain int (it is never None once constructed)."""
        return self.head_dim_qk if self.head_dim_vo is None else self.head_dim_vo

    def compiled(self) -> dict[str, Any]:
        """Return what is compiled into a kernel: the spec without what is a run-time value."""
        fields = asdict(self)
        del fields["num_qo_heads"], fields["num_kv_heads"], fields["page_size"]
        return {"group_size": self.group_size, "paged": self.is_paged, **fields}

    def __str__(self) -> str:
        """One line a person can read."""
        kv = "ragged" if self.page_size is None else f"pages of {self.page_size}"
        dims = (
            f"{self.head_dim_qk}"
            if self.head_dim_qk == self.head_dim_vo
            else f"{self.head_dim_qk}/{self.head_dim_vo}"
        )
        return (
            f"{self.num_qo_heads}/{self.num_kv_heads} heads, head dim {dims}, q {self.q_dtype}, "
            f"kv {self.kv_dtype}, o {self.o_dtype}, {self.kv_layout}, {kv}"
        )


@dataclass(frozen=True)
class Param:
    """A run-time parameter that a variant's hooks read as ``ctx.<name>``.

    Parameters
    ----------
    name : str
        A Python identifier; the keyword it is passed by.
    kind : {"scalar", "tensor", "bitmap"}
        A scalar; a tensor indexed by the hook (indices that are not constant are not checked when a
        kernel runs); or one bit per (query, key) pair of each request,
        which ``ctx.<name>`` reads for the current pair.
    dtype : str
        Element type. Bitmaps are bits and ignore it.
    shape : tuple of (int or str)
        Of a tensor: integers, or names of run-time sizes (``"num_qo_heads"``, ``"batch"``, any
        other name is a free size, the same wherever the shape has it).
    default : float, int or None
        Of a scalar; None makes the argument required.
    at : {"run", "plan"}
        Where it is given: with every run, or once per batch with the plan.
    narrows : bool
        A plan-time scalar that bounds the KV range: a run may give a smaller value (it clips), a
        larger one is an error. Negative values mean "unbounded".
    largest : float or None
        Of a float32 scalar: what larger values count as, infinity too.
    """

    name: str
    kind: Literal["scalar", "tensor", "bitmap"] = "scalar"
    dtype: str = "float32"
    shape: tuple[int | str, ...] = ()
    default: float | int | None = None
    at: Literal["run", "plan"] = "run"
    narrows: bool = False
    largest: float | None = None

    def __post_init__(self) -> None:
        """Validate the declaration."""
        if not _is_name(self.name) or self.name.startswith("_") or "__" in self.name:
            raise VariantError(
                f"parameter name {self.name!r} must be a Python identifier without a leading or a "
                "double underscore"
            )
        if self.kind not in ("scalar", "tensor", "bitmap"):
            raise VariantError(
                f"parameter {self.name!r}: kind {self.kind!r} is not scalar, tensor or bitmap"
            )
        if self.dtype not in PARAM_DTYPES:
            raise VariantError(
                f"parameter {self.name!r}: dtype={self.dtype!r} must be one of {PARAM_DTYPES}"
            )
        if self.kind == "scalar" and self.dtype not in SCALAR_DTYPES:
            raise VariantError(
                f"parameter {self.name!r}: dtype={self.dtype!r} of a scalar must be one of "
                f"{SCALAR_DTYPES}"
            )
        if self.at not in ("run", "plan"):
            raise VariantError(f"parameter {self.name!r}: at={self.at!r} is neither run nor plan")
        if self.kind == "tensor" and not self.shape:
            raise VariantError(f"parameter {self.name!r}: a tensor needs a shape")
        self._check_shape()
        if self.kind != "tensor" and self.shape:
            raise VariantError(f"parameter {self.name!r}: only tensors have a shape")
        if self.kind == "bitmap" and self.at != "plan":
            raise VariantError(f"parameter {self.name!r}: a bitmap belongs to the plan (at='plan')")
        if self.kind != "scalar" and self.default is not None:
            raise VariantError(f"parameter {self.name!r}: only scalars have a default")
        if self.narrows and (self.kind != "scalar" or not self.dtype.startswith("int")):
            raise VariantError(f"parameter {self.name!r}: only an integer scalar can narrow")
        if self.largest is not None and (self.kind, self.dtype) != ("scalar", "float32"):
            raise VariantError(f"parameter {self.name!r}: only a float32 scalar has a largest")
        self._check_default()

    def _check_shape(self) -> None:
        shape: Any = self.shape
        if not isinstance(shape, tuple | list) or not all(
            _is_name(size) or is_count(size, 0) for size in shape
        ):
            raise VariantError(
                f"parameter {self.name!r}: shape={shape!r} must be a tuple of integers of at least "
                "0 and names of sizes"
            )
        plain = tuple(size if isinstance(size, str) else int(size) for size in shape)
        object.__setattr__(self, "shape", plain)

    def _check_default(self) -> None:
        default: Any = self.default
        if default is None:
            return
        if isinstance(default, bool) or not isinstance(default, Real):
            raise VariantError(f"parameter {self.name!r}: default={default!r} is no number")
        whole = integer(default)
        if self.dtype.startswith("int") and whole is None:
            raise VariantError(
                f"parameter {self.name!r}: default={default!r} of an {self.dtype} is no integer"
            )
        object.__setattr__(self, "default", float(default) if whole is None else whole)


def dtype_name(dtype: Any, argument: str) -> str:
    """Return the canonical name of a dtype given as a string or as a torch/numpy dtype."""
    is_numpy = isinstance(dtype, type) and dtype.__module__ == "numpy"
    name = dtype.__name__ if is_numpy else str(dtype).removeprefix("torch.")
    known = {"half": "float16", "float": "float32", "float8_e4m3": "float8_e4m3fn"}
    name = known.get(name, name)
    allowed = Q_DTYPES + FP8_DTYPES if argument == "kv_dtype" else Q_DTYPES
    if name not in allowed:
        raise SpecError(f"{argument}={dtype!r} must be one of {allowed}")
    return name


def integer(value: object) -> int | None:
    """Return an integer of Python's or numpy's as an int, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return int(value)


def is_count(value: object, minimum: int) -> bool:
    """Whether a value is an integer of at least `minimum`."""
    number = integer(value)
    return number is not None and number >= minimum


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.isidentifier()
