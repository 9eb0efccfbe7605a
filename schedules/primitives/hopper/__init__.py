"""What only Hopper has: boxes that are copied, and multiplications that are waited for."""
