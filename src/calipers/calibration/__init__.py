"""From data to parameters: what is watched, how data runs through a model, what was seen."""
