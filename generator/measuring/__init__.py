"""One variant on one device: compile, check, time."""
