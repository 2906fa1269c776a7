"""What landscapes say of the search, of the rules of lookup and of the estimate."""
