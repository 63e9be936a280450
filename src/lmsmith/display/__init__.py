"""lmsmith.display."""
