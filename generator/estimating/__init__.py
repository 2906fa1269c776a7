"""Estimates for a device that is not here."""
