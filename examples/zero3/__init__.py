"""The parts of train_zero3.py: its models, its DeepSpeed engine, its command line."""
