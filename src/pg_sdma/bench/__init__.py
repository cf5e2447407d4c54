"""Benchmarks of all-gathers: alone, as nccl-tests prints them, and beside matrix products."""
