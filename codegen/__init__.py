"""From scheduled TensorIR to code: ordered phases, compilers, cache and artifacts."""
