"""Counts what is in a corpus, part by part; the counts of parts merge. Start at ``scan.py``."""
