"""The traffic: when requests arrive, how long their prompts and answers are.

The first 2,000 requests of the Azure LLM inference trace 2023 (conversation); see
``tvm_attn/data/ATTRIBUTION.md``.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib import resources

import numpy as np

TRACE = "azure_llm_2023_conv.csv"
TRACE_NAME = "Azure LLM inference trace 2023 (conversation)"
TRACE_REQUESTS = 2000


@dataclass(frozen=True)
class Arrival:
    """A request as recorded.

    Attributes
    ----------
    time : float
        Seconds after the first arrival.
    prompt, answer : int
        Tokens of each, at least 1.
    """

    time: float
    prompt: int
    answer: int


def load_trace(count: int) -> list[Arrival]:
    """Return the first `count` requests of the trace, in order of arrival."""
    file = resources.files("tvm_attn").joinpath("data", TRACE)
    with file.open(encoding="utf-8") as lines:
        rows = [row for row, _ in zip(csv.DictReader(lines), range(count), strict=False)]
    times = np.array([row["TIMESTAMP"] for row in rows], dtype="datetime64[ns]")
    seconds = (times - times[0]) / np.timedelta64(1, "s")
    return [
        Arrival(float(second), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for second, row in zip(seconds, rows, strict=True)
    ]
