"""What every package needs and is not numerics: states, positions, devices, graphs, errors, printed text."""
