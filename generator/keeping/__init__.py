"""What outlives a run: trials, winners, misses."""
