"""What a model is made of: layers, experts, fused projections, norms and the Linears behind them.

Names of modules are known here and nowhere else.
"""
