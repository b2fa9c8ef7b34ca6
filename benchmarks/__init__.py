"""Measuring attention: `shapes` (what), `peers` (who), `measure` (how), `run`, `report`."""
