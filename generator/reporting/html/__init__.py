"""One page that shows what a device's record, journal and benchmark results say."""
