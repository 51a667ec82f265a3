"""Support code shared by all packages: states, positions, devices, CUDA graphs, errors, terminal output."""
