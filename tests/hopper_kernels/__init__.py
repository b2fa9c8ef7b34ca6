"""The Hopper kernels without a GPU: compiled ahead of time."""
