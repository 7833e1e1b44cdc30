"""A sign is a question about a log, answered yes, no or unknown, that speaks for or against a cause.

A new one is a function in the module of its subject; ``registry.py`` finds it by its type.
"""
