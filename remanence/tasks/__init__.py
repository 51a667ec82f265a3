"""What a model can be asked. Each file holds a task's generators and its scoring, for training and evaluation."""
