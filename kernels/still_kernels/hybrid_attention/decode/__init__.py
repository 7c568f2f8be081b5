"""The kernel of calls with one token, in Triton."""
