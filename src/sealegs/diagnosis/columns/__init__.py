"""From every column of a log to what is out of the ordinary in it. Start at ``judged.py``."""
