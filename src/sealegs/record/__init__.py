"""The run folder: written row by row, and read back into numpy. ``schema.py`` says what is in it."""
