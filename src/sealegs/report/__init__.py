"""From values to text: pages, progress lines, sentences about events."""
