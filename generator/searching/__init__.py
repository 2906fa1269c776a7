"""The search of a problem, and problems over GPUs and hosts."""
