"""What ships: kernels, tables and portfolios as files, and whether they are up to date and verified."""
