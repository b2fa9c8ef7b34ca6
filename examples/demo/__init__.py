"""The demo: `inputs` (model and text), `layer` and `model_checks` (what is compared), `show`."""
