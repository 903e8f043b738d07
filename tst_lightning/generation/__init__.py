"""Text from a trained network."""
