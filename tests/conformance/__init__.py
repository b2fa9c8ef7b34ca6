"""The conformance suite: what every backend must do, judged by the float64 reference."""
