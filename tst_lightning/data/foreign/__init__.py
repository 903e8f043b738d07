"""Token files that other training stacks write. One file a format."""
