"""How ops are computed: reference, Triton kernels, ahead-of-time archive."""
