"""A call of a linear layer over several inputs."""
