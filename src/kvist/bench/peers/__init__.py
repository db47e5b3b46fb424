"""Drivers of the engines that are compared: scripts that run in each engine's own Python, one process an engine.

`host.py` is the program; a driver is a file beside it with one function, `load(setup)`, that gives `(generate, facts)`. They import
nothing of kvist (but kvist's own driver): a peer's environment does not have it.
"""
