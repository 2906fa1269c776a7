"""How compiled kernels are launched: the launchers, plans of repeated calls, overwriting, and limits on resident programs."""
