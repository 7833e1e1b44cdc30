"""The site of the docs: ``assemble.py`` lays its pages out, zensical makes HTML of them (`make docs`)."""
