"""A small GPT in plain torch that trains in dp × tp × pp × cp × ep, with real mistakes of other systems to put in.

It imports nothing of Threefold but `threefold_parity`, whose subject it is. Without a mistake every layout equals one
process up to rounding (`python -m benchmarks.parity --layouts`). `--mistake` puts one in where it was; they are
listed, with their threads, in `mistakes.py`, and each is a condition at the one place in the code that had it.
"""
