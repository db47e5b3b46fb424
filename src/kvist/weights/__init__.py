"""Model files in, packed weights out. Importing this room imports nothing."""
