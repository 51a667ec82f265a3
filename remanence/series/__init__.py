"""Networks that forecast: numbers in, numbers out, with the neural memory between them or a baseline instead."""
