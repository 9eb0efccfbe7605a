"""Tests that need a GPU; see `tests.gpu.conftest`."""
