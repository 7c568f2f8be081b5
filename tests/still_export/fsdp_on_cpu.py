"""The command line under FSDP without a GPU: accelerate shards on accelerators alone and takes DDP elsewhere, so it is told it has one.

Run by torchrun with accelerate's variables; says on stderr whether the run was sharded.
"""

from __future__ import annotations

import sys

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from still_export.cli.main import main

PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
try:
    main()
finally:
    print(f"sharded: {AcceleratorState._shared_state.get('distributed_type') == DistributedType.FSDP}", file=sys.stderr)
