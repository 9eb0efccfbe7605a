"""Measurements: workloads, timing and reports."""
