"""What happens around the training step."""
