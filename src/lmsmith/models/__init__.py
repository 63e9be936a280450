"""lmsmith.models."""
