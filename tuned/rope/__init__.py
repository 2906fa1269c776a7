"""Rotary position embedding: spec, variants, launches, and the way of a call."""
