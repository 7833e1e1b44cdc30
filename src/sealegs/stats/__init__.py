"""How surprising is the next number of a stream? Start at ``streaming.py``."""
