"""Benchmarks of attention: `shapes` (cases), `peers` (libraries), `measure`, `run`, `report`."""
