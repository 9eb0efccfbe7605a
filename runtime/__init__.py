"""Plan and run: needs no compiler and no `import tvm`."""
