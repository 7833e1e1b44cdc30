"""From runs to one HTML file of panels. Start at ``values.py``."""
