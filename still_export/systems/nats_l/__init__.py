"""NAtS-L (arXiv:2602.03681)."""

MODEL_TYPES = ("neural_attention_search_linear_attn_gdn",)
