"""Metadata of a vLLM step for stateful layers: token positions and pages of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from still_export.serving.vllm.parts import ranges_of, rounded_up
from still_kernels.packing import Packing


class PagedBackend(AttentionBackend):
    """vLLM's attention backend for states in pages."""

    @staticmethod
    def get_name() -> str:
        return "STILL_PAGED"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("layers with states of their own call their kernels themselves")

    @staticmethod
    def get_builder_cls() -> type[PagedMetadataBuilder]:
        return PagedMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


@dataclass
class PagedMetadata:
    """Calls of a step: rows with one token, and prompts grouped by similar length, each with the tokens that its rows have seen."""

    calls: list[tuple[Packing, Tensor]]


class PagedMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Reads nothing back from the device. Tensors used by CUDA graphs of single tokens have fixed addresses."""

    reorder_batch_threshold = 1
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        rows = vllm_config.scheduler_config.max_num_seqs
        graphs = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        rows = max(rows, graphs)
        self.pages = kv_cache_spec.pages.padded(kv_cache_spec.page_size_bytes)
        self.tables = torch.zeros(rows, self.pages.columns, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        """The calls of a step; rows with one token are first in the batch."""
        m = common_attn_metadata
        count = m.num_reqs
        start = m.query_start_loc[: count + 1]
        tables, lengths = self.tables[:count], self.lengths[:count]
        # Padding rows of a graph have no pages.
        torch.clamp(m.block_table_tensor[:count, : self.pages.columns], min=0, out=tables)
        lengths.copy_(m.seq_lens[:count] - start.diff())
        single = split_decodes_and_prefills(m, decode_threshold=1)[0]
        calls = []
        if single:
            calls.append((Packing(start[: single + 1], tables[:single], 1, self.pages), lengths[:single]))
        places = m.query_start_loc_cpu[single : count + 1]
        counts: Sequence[int] = places.diff().tolist()
        for first, last in ranges_of(counts):
            longest = rounded_up(max(counts[first:last]))
            part = slice(single + first, single + last)
            packing = Packing(start[part.start : part.stop + 1], tables[part], longest, self.pages)
            calls.append((packing, lengths[part]))
        return PagedMetadata(calls)
