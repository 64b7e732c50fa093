"""Benchmarks: each module is one question, with its latest answer in its header. `python -m benchmarks` runs all."""
