"""What tuning needs to know of each family besides its kernels."""
