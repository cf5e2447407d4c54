"""What train_zero3.py is made of: its models, its DeepSpeed engine, its command line."""
