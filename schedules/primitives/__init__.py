"""The vocabulary of tensor-core kernels: stage a tile, multiply fragments, close their rows."""
