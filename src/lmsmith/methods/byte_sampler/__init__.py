"""lmsmith.methods.byte_sampler."""
