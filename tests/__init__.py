"""Tests of tvm_attn, one file a promise or a module."""
