"""Tests of tuned and generator, on any machine; those under gpu/ want a GPU."""
