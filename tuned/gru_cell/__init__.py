"""One step of a GRU: two library GEMMs, and a kernel for the gates."""
