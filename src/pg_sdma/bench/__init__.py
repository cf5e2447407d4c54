"""Benchmarks of collectives: alone, as nccl-tests prints them, and beside matrix products."""
