"""Bytes."""

MIB = 2**20
GIB = 2**30
FP32 = 4  # of a number
BF16 = 2
