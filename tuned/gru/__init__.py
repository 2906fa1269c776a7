"""A GRU over whole sequences: layers, directions, padded or packed."""
