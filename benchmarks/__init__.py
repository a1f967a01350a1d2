"""Benchmarks: one script per published number; each prints reference, ours and their ratio, from one run."""
