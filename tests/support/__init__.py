"""What tests share. No test is in this folder, and no test imports another test's file."""
