"""Published ways to choose blocks of keys, a file a method, each a few stages that are functions of their own.

``chosen(q, k, config, grid, scale)`` of each file is the whole choice.
"""
