"""From a whole loss curve to the stretches where something is wrong with it. Start at ``stretches.py``."""
