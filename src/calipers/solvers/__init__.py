"""From statistics and values to scale and zero point: pure functions, problem → solution."""
