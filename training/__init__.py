"""Training a GPT with flashtile: `python -m training.train`, described in docs/training.md."""
