"""One HTML page that shows a device's record, journal and benchmark results."""
