"""Benchmarks of collectives: alone, with the columns of nccl-tests, and beside matrix products."""
