"""The ops of the domain "still": one OpSpec per op, the single source of names, order, shapes, dtypes, states and attributes."""

from __future__ import annotations

from still_graphs.ops.add_rms_norm import ADD_RMS_NORM
from still_graphs.ops.angle_sum import ANGLE_SUM
from still_graphs.ops.attention import ATTENTION
from still_graphs.ops.block_attention import BLOCK_ATTENTION
from still_graphs.ops.causal_conv import CAUSAL_CONV
from still_graphs.ops.cluster_tokens import CLUSTER_TOKENS
from still_graphs.ops.dense_matmul import DENSE_MATMUL
from still_graphs.ops.experts import EXPERTS
from still_graphs.ops.experts_nbits import EXPERTS_NBITS
from still_graphs.ops.gated_mlp import GATED_MLP
from still_graphs.ops.greedy_token import GREEDY_TOKEN
from still_graphs.ops.hybrid_attention import HYBRID_ATTENTION
from still_graphs.ops.landmark_attention import LANDMARK_ATTENTION
from still_graphs.ops.linear_attention import LINEAR_ATTENTION
from still_graphs.ops.local_linear_attention import LOCAL_LINEAR_ATTENTION
from still_graphs.ops.low_rank_matmul import LOW_RANK_MATMUL
from still_graphs.ops.matmul_nbits import MATMUL_NBITS
from still_graphs.ops.rank_one_attention import RANK_ONE_ATTENTION
from still_graphs.ops.rotary_qkv import ROTARY_QKV
from still_graphs.ops.round_key_value import ROUND_KEY_VALUE
from still_graphs.ops.route import ROUTE
from still_graphs.ops.routed_attention import ROUTED_ATTENTION
from still_graphs.ops.select_blocks import SELECT_BLOCKS
from still_graphs.ops.spec import DOMAIN, OpSpec
from still_graphs.ops.strided_attention import STRIDED_ATTENTION
from still_graphs.ops.swi_glu import SWI_GLU

OPS: dict[str, OpSpec] = {
    op.name: op
    for op in (
        HYBRID_ATTENTION,
        ATTENTION,
        LINEAR_ATTENTION,
        CAUSAL_CONV,
        MATMUL_NBITS,
        DENSE_MATMUL,
        GATED_MLP,
        ROTARY_QKV,
        ADD_RMS_NORM,
        SWI_GLU,
        ROUND_KEY_VALUE,
        LOW_RANK_MATMUL,
        GREEDY_TOKEN,
        ROUTE,
        EXPERTS,
        EXPERTS_NBITS,
        SELECT_BLOCKS,
        BLOCK_ATTENTION,
        RANK_ONE_ATTENTION,
        LOCAL_LINEAR_ATTENTION,
        STRIDED_ATTENTION,
        ANGLE_SUM,
        ROUTED_ATTENTION,
        LANDMARK_ATTENTION,
        CLUSTER_TOKENS,
    )
}
"""Every op of the domain by its ONNX name."""
OPSET, FUSED_OPSET = 23, 27
"""Of ai.onnx in portable graphs, and the first that has ops which bodies can stand around."""

__all__ = ["DOMAIN", "FUSED_OPSET", "OPS", "OPSET", "OpSpec"]
