"""What a demo run has to say: for people, for programs, and as a verdict."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from tvm_attn.demo.engine import Seconds
from tvm_attn.demo.options import DemoOptions
from tvm_attn.reference import Accuracy

FAILURES_SHOWN = 5


@dataclass(frozen=True)
class Summary:
    """The outcome of a demo run.

    Attributes
    ----------
    options : DemoOptions
        What was run.
    steps, prefill_tokens, decode_tokens, largest_batch : int
        Steps, the query tokens of each kind, the most requests in a step.
    clock : float
        Seconds that passed on the server's clock.
    seconds : Seconds
        Where the time went.
    checks : int
        Results compared with float64.
    worst : dict of str to Accuracy
        The out and the lse closest to their bounds.
    failures : list of str
        Results that passed their bound.
    high_water : int
        The most pages held at once.
    leaked : list of int
        Pages not given back.
    picture : str
        One plan, drawn.
    """

    options: DemoOptions
    steps: int
    prefill_tokens: int
    decode_tokens: int
    largest_batch: int
    clock: float
    seconds: Seconds
    checks: int
    worst: dict[str, Accuracy]
    failures: list[str]
    high_water: int
    leaked: list[int]
    picture: str

    @property
    def ok(self) -> bool:
        """Whether something was checked, every bound was kept and no page leaked."""
        return self.checks > 0 and not self.failures and not self.leaked

    @property
    def tokens(self) -> int:
        """Query tokens computed, in each layer."""
        return self.prefill_tokens + self.decode_tokens

    @property
    def tokens_per_second(self) -> float:
        """Tokens over the time to append, plan and run all layers."""
        return self.tokens / self.seconds.total if self.seconds.total else 0.0

    def to_json(self) -> str:
        """Return everything but the picture as JSON."""
        fields: dict[str, Any] = asdict(self)
        del fields["picture"]
        for quantity, measured in self.worst.items():
            fields["worst"][quantity]["ratio"] = measured.ratio
        derived = {"ok": self.ok, "tokens_per_second": self.tokens_per_second}
        return json.dumps({**derived, **fields}, indent=2)

    def __str__(self) -> str:
        """Return the report, picture and verdict included."""
        return "\n\n".join(["\n".join(self._numbers()), self.picture, self._verdict()])

    def _numbers(self) -> list[str]:
        s = self.seconds
        steps = max(self.steps, 1)
        runs = steps * self.options.num_layers
        rows = {
            "steps": f"{self.steps:,}, of up to {self.largest_batch} requests; "
            f"{self.clock:.0f} s on the server's clock",
            "tokens": f"{self.tokens:,} (prefill {self.prefill_tokens:,}, "
            f"decode {self.decode_tokens:,})",
            "append time": f"{s.append:.2f} s, {s.append / runs * 1e6:.0f} us a layer",
            "plan time": f"{s.plan:.2f} s, {s.plan / steps * 1e6:.0f} us a step",
            "run time": f"{s.run:.2f} s, {s.run / runs * 1e6:.0f} us a layer",
            "throughput": f"{self.tokens_per_second:,.0f} tokens/s "
            f"through {self.options.num_layers} layers",
            "accuracy": f"{self.checks:,} results checked against float64, "
            f"{len(self.failures)} past their bound",
            **{f"largest error of {name}": _error(worst) for name, worst in self.worst.items()},
            "pages": f"at most {self.high_water:,} of {self.options.num_pages:,} held, "
            f"{len(self.leaked)} leaked",
        }
        width = max(map(len, rows))
        return [f"{name:<{width}}  {value}" for name, value in rows.items()]

    def _verdict(self) -> str:
        if self.ok:
            return "OK: every bound kept, every page given back"
        reasons = [f"bound passed: {failure}" for failure in self.failures[:FAILURES_SHOWN]]
        if len(self.failures) > FAILURES_SHOWN:
            reasons.append(f"... {len(self.failures) - FAILURES_SHOWN} more ...")
        if self.leaked:
            reasons.append(f"pages leaked: {', '.join(map(str, self.leaked[:16]))}")
        if not self.checks:
            reasons.append("nothing was checked")
        return "\n".join(["FAILED", *reasons])


def _error(worst: Accuracy) -> str:
    return (
        f"{worst.max_error:.1e} where {worst.max_bound:.1e} is allowed, rms {worst.rms_error:.1e} "
        f"where {worst.rms_bound:.1e} is: {worst.ratio:.0%} of the bound"
    )
