"""What every room needs and that is no numerics: state, files, devices, tokens, axes."""
