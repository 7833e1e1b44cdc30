"""Small programs with a mistake in them, whose loops an incident trains as if they were somebody's own."""
