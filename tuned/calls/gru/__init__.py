"""A call of a GRU over sequences: arguments, plans, launches, operators, tracing."""
