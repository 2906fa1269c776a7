"""What tune.py new-family writes: a family that works, its tests, and how to go on."""
