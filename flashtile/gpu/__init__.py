"""Code that all GPU code shares: hardware facts, launches, tensor arguments, intrinsics."""
