"""lmsmith.cli."""
