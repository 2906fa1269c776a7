"""Variants that are broken on purpose."""
