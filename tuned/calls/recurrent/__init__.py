"""What serves a call of the GRU, of its step and of the linear over segments: a kernel, our operator or PyTorch's."""
