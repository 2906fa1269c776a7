"""From templates to kernels: render, name, commit, show."""
