"""The Triton kernels without a GPU: interpreted, and compiled ahead of time."""
