"""A call of RoPE: arguments, plans by properties, plans for new lengths, operators."""
