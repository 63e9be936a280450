"""A workbench for open-weight language models."""
