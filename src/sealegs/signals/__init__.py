"""From tensors on the device to the numbers of a row, without waiting for them. Start at ``measure.py``."""
