"""Faults that are put into a copy of the tree one after the other, to see that the tests fail: ``python -m tests.faults``."""
