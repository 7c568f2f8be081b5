"""A SwiGLU network whose weights are trained on the tokens that pass, a chunk at a time (LaCT): definition."""
