"""Typed errors: each names the argument, what was given, what is allowed and what to do."""

from __future__ import annotations


class TvmAttnError(Exception):
    """Base class of every error this library raises on purpose."""


class SpecError(TvmAttnError, ValueError):
    """An `AttentionSpec`, variant or format contradicts itself or asks for what is unsupported."""


class VariantError(TvmAttnError, ValueError):
    """A variant hook or a run-time parameter is declared or used wrongly."""


class TargetError(TvmAttnError, ValueError):
    """A target cannot be parsed, is incomplete, or cannot be built for."""


class PlanError(TvmAttnError, ValueError):
    """The arrays given to `plan` do not describe a valid batch."""


class LimitError(PlanError):
    """A batch is larger than the declared `PlanLimits`."""


class ShapeError(TvmAttnError, ValueError):
    """A tensor has the wrong shape, strides or device."""


class DTypeError(TvmAttnError, TypeError):
    """A tensor has the wrong dtype, or an argument the wrong type."""


class WorkspaceError(TvmAttnError, ValueError):
    """A caller's buffer is too small; the message has both sizes in bytes."""


class StalePlanError(TvmAttnError, RuntimeError):
    """A plan is used after it was replanned for, or with, something else."""


class CompileError(TvmAttnError, RuntimeError):
    """A compiler refused what was generated, or the user's hook could not be traced."""


class ArtifactError(TvmAttnError, RuntimeError):
    """A file is not a loadable artifact, or belongs to another machine or version."""


class ProcessError(TvmAttnError, RuntimeError):
    """A kernel cannot run in this process."""
