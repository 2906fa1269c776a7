"""The gradient of a GRU over sequences as a problem of its own; calls are served in ``tuned.calls.gru.training``."""
