"""What can be said of a device that is not here."""
