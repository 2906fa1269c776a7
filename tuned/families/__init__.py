"""What a kernel family is: its spec, its variants and their rules, and what a call of it launches. No device is asked."""
