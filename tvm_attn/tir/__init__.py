"""TensorIR definitions: what attention computes, and the planner, merge and copies."""
