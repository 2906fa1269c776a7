"""The files that tune.py new-family writes: a family that works, its tests, and a README."""
