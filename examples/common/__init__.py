"""What the example trainers share: the model, the text, the training loop and its report."""
