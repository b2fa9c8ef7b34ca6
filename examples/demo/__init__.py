"""The demo: `inputs` (model and text), `layer` and `model_checks` (the comparisons), `show`."""
