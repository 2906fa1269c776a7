"""What is kept of measurements: trials, winners, landscapes, and samples of variants on single problems."""
