"""How compiled kernels are launched: the launchers, plans of known calls, overwriting, and limits on resident programs."""
