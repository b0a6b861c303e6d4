"""Benchmarks: ``python -m benchmarks.<name> [--quick] [--json out.json]``."""
