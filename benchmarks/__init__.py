"""Benchmarks: this project against its peers and against the physical limit."""
