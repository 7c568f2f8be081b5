"""The command line under FSDP without a GPU: accelerate shards on accelerators alone and takes DDP elsewhere, so it is told it has one.
So is what compiles norms, MLPs and output projections.

Run by torchrun with accelerate's variables; says on stderr whether the run was sharded, and whether compiled code ran.
"""

from __future__ import annotations

import sys

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from still_export.cli.main import main
from still_export.linearization import run

PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
fuse = run.fuse_layers
run.fuse_layers = lambda model, _: fuse(model, torch.device("cuda"))
try:
    main()
finally:
    print(f"compiled: {torch._dynamo.utils.counters['stats']['unique_graphs'] > 0}", file=sys.stderr)
    print(f"sharded: {AcceleratorState._shared_state.get('distributed_type') == DistributedType.FSDP}", file=sys.stderr)
