"""The functions of still::HybridAttention, by kernel."""

from __future__ import annotations

from still_kernels.hybrid_attention.decode.triton_decode import decode_kernel
from still_kernels.hybrid_attention.plan.tiles import CLUSTERS
from still_kernels.hybrid_attention.prefill.triton_attend import attend_kernel, commit_kernel
from still_kernels.hybrid_attention.prefill.triton_features import features_kernel
from still_kernels.hybrid_attention.prefill.triton_linear import linear_kernel
from still_kernels.hybrid_attention.prefill.triton_scan import scan_kernel
from still_kernels.hybrid_attention.prefill.triton_score import score_kernel
from still_kernels.hybrid_attention.prefill.triton_select import select_kernel
from still_kernels.hybrid_attention.prefill.triton_unpack import unpack_kernel
from still_kernels.hybrid_attention.sm90.cuda_decode import decode_cluster_kernel
from still_kernels.hybrid_attention.sm90.gluon_attend import attend_tma_kernel
from still_kernels.hybrid_attention.sm90.gluon_linear import linear_tma_kernel
from still_kernels.hybrid_attention.sm90.gluon_scan import scan_tma_kernel

FUNCTIONS = {
    "score": score_kernel,
    "select": select_kernel,
    "unpack": unpack_kernel,
    "features": features_kernel,
    "scan": scan_kernel,
    "scan_tma": scan_tma_kernel,
    "linear": linear_kernel,
    "linear_tma": linear_tma_kernel,
    "attend": attend_kernel,
    "attend_tma": attend_tma_kernel,
    "commit": commit_kernel,
    "decode": decode_kernel,
    **{f"decode_{blocks}": decode_cluster_kernel for blocks in CLUSTERS},
}
