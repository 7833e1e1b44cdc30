"""Where a run is in its data: all loaders, numbered batches, the way back to one. Start at ``position.py``."""
