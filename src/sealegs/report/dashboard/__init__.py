"""From runs to one HTML file of ten panels. Start at ``values.py``."""
