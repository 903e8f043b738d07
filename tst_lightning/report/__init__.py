"""Runs side by side: a table, comparisons in words and numbers, and a picture."""
