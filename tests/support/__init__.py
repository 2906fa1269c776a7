"""What tests share: no test stands here, and no test imports another test's file."""
