"""Tasks for models. Each file contains a task's data generators and its scoring, for training and evaluation."""
