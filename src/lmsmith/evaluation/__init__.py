"""lmsmith.evaluation."""
