"""The hot loops, one file per operation, in plain torch for any device."""
