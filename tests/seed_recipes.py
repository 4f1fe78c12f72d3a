"""Recipes that stand among the seed documents."""

OVERVIEW = """\
quantization_stage:
  quantization_modifiers:
    {modifier}:
      weights:
        observer: mse
        observer_kwargs:
          maxshrink: 0.1
          patience: 10
          averaging_constant: 0.05
          grid: 128.0
          norm: 2.0
        num_bits: 4
        type: int
        symmetric: true
        strategy: channel
      targets:
        - Linear
"""
"""The example of the observers' overview; ``modifier`` is GPTQModifier there."""
