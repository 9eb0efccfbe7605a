"""How the phases of attention run on a machine: tiles, primitives, one schedule per target."""
