"""What is kept of measuring: trials, winners, landscapes, and the problems that models ran."""
