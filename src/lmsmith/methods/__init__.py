"""lmsmith.methods."""
