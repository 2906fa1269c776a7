"""A linear layer over several inputs, taken as if concatenated."""
