"""From a run and an incident to its post-mortem. Start at ``build.py``."""
