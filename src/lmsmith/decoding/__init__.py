"""lmsmith.decoding."""
