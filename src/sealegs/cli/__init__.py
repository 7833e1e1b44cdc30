"""One module a command; ``main.py`` has the table of them.

A new command is a ``main(arguments)`` here and a line in that table. What it prints is in ``sealegs.report.commands``.
"""
