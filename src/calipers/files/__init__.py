"""Files on disk: read without surprises, written whole or not at all."""
