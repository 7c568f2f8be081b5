"""A SwiGLU network trained at run time, a chunk at a time (LaCT): definition."""
