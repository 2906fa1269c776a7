"""Tests of generator.measuring."""
