"""What multiplies by packed weights: compiled code on a CPU, Triton on a GPU. Nothing is loaded before it is needed."""
