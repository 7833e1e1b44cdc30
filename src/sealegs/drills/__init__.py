"""A drill breaks a run on purpose and scores what becomes of it. ``catalogue.py`` has all of them."""
