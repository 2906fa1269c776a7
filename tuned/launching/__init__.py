"""Compiled kernels and how they are launched: plans of known calls, the launcher, overwriting, resident programs."""
