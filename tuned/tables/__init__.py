"""Dispatch tables, one module a device, generated from tuned/winners."""
