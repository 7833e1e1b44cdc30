"""What each command prints, as a page or as JSON. One module a command."""
