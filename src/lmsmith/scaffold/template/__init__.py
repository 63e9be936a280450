"""Plain decoding at a fraction of the temperature that was asked for.

Problem: say in a line what goes wrong without the method.
Idea: draw from a sharper distribution than the one that was asked for.
Equation: temperature = factor * requested temperature.
Simplified: say what the paper does that this does not.
"""
