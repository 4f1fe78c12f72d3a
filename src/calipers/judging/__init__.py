"""What tensors, modules and models lose by quantization: one definition for all who tell it."""
