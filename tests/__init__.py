"""Tests of tuned and generator, on any machine; those under gpu/ need a GPU."""
