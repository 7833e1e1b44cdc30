"""Spreads rare tokens over batches, and leaves listed documents out. Start at ``batch_sampler.py``."""
