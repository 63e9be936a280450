"""One theme for terminal tables, progress and figures.

A leaf: any room may use it, and it imports rich and matplotlib only when something is shown.
"""
