"""Named, seeded faults that work on any loop. ``spec.py`` has the list, and how each is spelled."""
