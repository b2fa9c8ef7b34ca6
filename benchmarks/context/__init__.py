"""``torchrun -m benchmarks --preset context``: attention over ranks against one process."""
