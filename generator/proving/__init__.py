"""Landscapes, and what they prove of the search, of the rule for untuned calls, and of a portfolio."""
