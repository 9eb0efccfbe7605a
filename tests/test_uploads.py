"""Copies by direct calls of the driver, and memory that is kept while they read it."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tvm_attn.runtime import upload
from tvm_attn.runtime.buffers import Layout, Pool
from tvm_attn.runtime.upload import NOT_READY, RELAXED, Driver, Upload, let_go

STREAM = SimpleNamespace(cuda_stream=7)
WORDS = 50
MADE = 40


class Event:
    """An event of torch's, over when the driver is said to be idle."""

    cuda_event = MADE
    is_over = False
    records = 0

    def record(self, stream: object) -> None:
        assert stream is STREAM
        type(self).records += 1

    def query(self) -> bool:
        return self.is_over


class Gpu:
    """A driver that copies at once, and says that it has done so later."""

    fails = False
    mode = 0

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.modes: list[int] = []

    def copy(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        self.calls.append(f"copy {size.value} on {stream.value}")
        if not self.fails:
            ctypes.memmove(target, source, size.value)
        return 201 * self.fails

    def record(self, event: Any, stream: Any) -> int:
        self.calls.append(f"record {event.value} on {stream.value}")
        return 0

    def query(self, event: Any) -> int:
        assert event.value == MADE
        self.modes.append(self.mode)
        return 0 if Event.is_over else NOT_READY

    def exchange_mode(self, mode: Any) -> int:
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    functions = Driver(made.copy, made.record, made.query, made.exchange_mode)
    monkeypatch.setattr(upload, "driver", lambda: functions)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "is_over", False)
    monkeypatch.setattr(Event, "records", 0)
    return made


@pytest.fixture
def memory() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(WORDS, dtype=torch.int32), torch.zeros(WORDS, dtype=torch.int32)


def test_a_copy_is_two_calls_of_the_driver(
    gpu: Gpu, memory: tuple[torch.Tensor, torch.Tensor]
) -> None:
    source, target = memory
    made = Upload(source, target, STREAM)
    for words in (20, 30):
        target.zero_()
        made.start(words)
        assert torch.equal(target[:words], source[:words]) and not target[words:].any()
    assert gpu.calls == ["copy 80 on 7", "record 40 on 7", "copy 120 on 7", "record 40 on 7"]
    assert Event.records == 1, "to make the event"


@pytest.mark.parametrize("reason", ["none", "fails"])
def test_torch_copies_where_the_driver_does_not(
    monkeypatch: pytest.MonkeyPatch,
    gpu: Gpu,
    memory: tuple[torch.Tensor, torch.Tensor],
    reason: str,
) -> None:
    if reason == "none":
        monkeypatch.setattr(upload, "driver", lambda: None)
    gpu.fails = reason == "fails"
    source, target = memory
    made = Upload(source, target, STREAM)
    made.start(20)
    assert torch.equal(target[:20], source[:20]) and not target[20:].any()
    assert Event.records == 2 and not any("record" in call for call in gpu.calls)


def test_nobody_s_capture_ends_when_it_is_asked_whether_a_copy_is_over(
    gpu: Gpu, memory: tuple[torch.Tensor, torch.Tensor]
) -> None:
    made = Upload(*memory, STREAM)
    made.start(20)
    assert not made.is_over()
    Event.is_over = True
    assert made.is_over()
    assert gpu.modes == [RELAXED] * 2
    assert gpu.mode == Gpu.mode, "of everything else"


def test_a_block_that_is_read_goes_to_no_other_plan(gpu: Gpu) -> None:
    pool = Pool(Layout({"all": (WORDS,)}), pinned=False)
    block, target = pool.take(), torch.zeros(64, dtype=torch.int32)
    stream: Any = STREAM
    block.send(target, 20, stream)
    block.send(target, 30, stream)
    assert Event.records == 1, "an upload serves as long as it goes to the same place"
    block.send(torch.zeros(64, dtype=torch.int32), 30, stream)
    assert Event.records == 2
    block.give_back()
    assert pool.take() is not block
    Event.is_over = True
    assert pool.take() is block


def test_memory_that_is_let_go_of_is_kept_while_it_is_read(
    gpu: Gpu, memory: tuple[torch.Tensor, torch.Tensor]
) -> None:
    before = len(upload._kept)
    made = Upload(*memory, STREAM)
    made.start(10)
    del made
    gc.collect()
    assert len(upload._kept) == before + 1 and upload._kept[-1]._source is memory[0]
    let_go()
    assert len(upload._kept) == before + 1
    Event.is_over = True
    let_go()
    assert not upload._kept


def test_no_driver_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "DRIVER", "libcuda_that_nobody_has.so")
    assert upload.driver.__wrapped__() is None
