"""lmsmith.testing."""
