"""The loop over the parts of a model: sources of weights and statistics, steps, sinks."""
