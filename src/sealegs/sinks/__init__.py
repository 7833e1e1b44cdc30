"""Where rows and events go besides the run folder: trackers, and messages to people.

A new tracker is a class that is a ``sealegs.vocabulary.Sink``; ``trackers.py`` has the list.
"""
