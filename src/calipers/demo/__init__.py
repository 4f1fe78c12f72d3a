"""A random transformer block, measured by every observer."""
