"""TensorIR definitions: what attention computes, and the planner, merge and copies."""

from tvm_attn import _compat

_compat.import_tvm()  # which checks TVM's version and lets it trace faster
