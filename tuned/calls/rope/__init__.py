"""A call of RoPE: arguments, plans by properties, lengths, operators."""
