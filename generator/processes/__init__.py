"""The processes that measure and compile, which may be lost at any time."""
