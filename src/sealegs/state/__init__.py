"""The state of a run, copied and restored: snapshots, checkpoints, their audit. Start at ``training_state.py``."""
