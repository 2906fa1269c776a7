"""What is kept of measurements: trials, winners, landscapes, and the problems that models ran."""
