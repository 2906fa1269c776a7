"""What landscapes say about the search, the rules of lookup and the estimate."""
