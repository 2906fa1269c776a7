"""A call of one step of a GRU: arguments, launches."""
