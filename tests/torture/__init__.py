"""Hostile checks of a GPU: `make torture`. Each runs in a process of its own, from a seed; board.py starts them."""
