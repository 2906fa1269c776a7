"""A folder for each family, and a module for each thing that families share."""
