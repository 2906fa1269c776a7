"""What serves a call of the GRU, of its step and of the linear over segments: a kernel, an operator or PyTorch's own."""
