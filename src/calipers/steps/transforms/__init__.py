"""Steps that change a model before it is measured, so that it is quantized better."""
