"""What a kernel family is: its spec, its variants and their rules, and what a call launches. Nothing here asks a device."""
