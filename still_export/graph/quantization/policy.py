"""Which weights get how many bits, role by role, with the reasons."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from still_export.errors import ConfigError, UnsupportedError, unknown
from still_export.mixers.roles import EMBEDDING, FEATURE_MAP, FEED_FORWARD, GATE, HEAD, NORM, PROJECTION, ROUTER

SCHEMES = ("int8", "int4", "fp8")
FLOAT8 = "fp8"
"""The scheme of e4m3 weights; its products also round tokens to e4m3."""
FLOAT8_BLOCK = 128
"""Inputs that share a scale in such a weight, if not all of an output do."""
NODES = "com.microsoft", "dequantized", "plugin"
"""What computes with low-bit weights: ONNX Runtime's own nodes, standard nodes that dequantize, this project's kernels."""
RUNTIME, DEQUANTIZED, PLUGIN = NODES
GPTQ = "gptq"
"""The method that rounds a weight against its inputs, by GPTQModel (calibrate.py)."""
METHODS = ("rtn", GPTQ)
HALF = 16
"""Bits of a half precision weight, which is cast to the model's type when read."""
DEFAULT_METHOD = "rtn"
"""Codes span the smallest to largest weight of a block, rounded to nearest."""
LORA = ("apart", "merged")
DEFAULT_LORA = "apart"
"""The demo model, int4: mean KL 0.0000 nats on 2,048 tokens apart from the exact blocks of its Q4_1 base, 0.264 merged and rounded."""


def parse_budget(text: str) -> float:
    """The fraction in `text`: "+1%" is 0.01.

    Raises:
        ConfigError: `text` has another form.
    """
    if re.fullmatch(r"\+\d+(\.\d+)?%", text) is None:
        raise ConfigError(
            f"--quantize-budget {text!r} is no budget: it is what bits per byte may grow by, such as +1% or +0.5%."
        )
    return float(text[1:-1]) / 100


@dataclass(frozen=True)
class Layout:
    """Form of a target's low-bit weights.

    Args:
        form: Name for messages.
        block_sizes: Supported numbers of weights that share a scale, along a product's inputs; the first is the default.
        nodes: One of NODES.
        zero_points: 4-bit blocks have zero points; else the middle code stands for 0.
        blocks_of_eight: 8-bit weights also have a scale for each block; else one for each output.
        rows: Rows of an embedding can be read in 8 bits.
        adapters: Products accept LoRA pairs at run time.
        half_scales: Weights rounded here have half precision scales; blocks of files keep their own.
        super_blocks: K-quants of GGUF files can be stored bit for bit.
        float8: Weights can be e4m3.
    """

    form: str
    block_sizes: tuple[int, ...]
    nodes: str = DEQUANTIZED
    zero_points: bool = False
    blocks_of_eight: bool = False
    rows: bool = False
    adapters: bool = False
    half_scales: bool = False
    super_blocks: bool = False
    float8: bool = False


ONNXRUNTIME = Layout("MatMulNBits", (32, 16, 64, 128, 256), RUNTIME, True, True, True, adapters=True)
"""What ONNX Runtime's own kernels support."""


@dataclass(frozen=True)
class Rule:
    """Bits of a role's weights by scheme (None: unchanged), and the reason."""

    int8: int | None
    int4: int | None
    reason: str
    fp8: int | None = None

    def bits(self, scheme: str) -> int | None:
        return {"int8": self.int8, "int4": self.int4, FLOAT8: self.fp8}[scheme]


POLICY = {
    PROJECTION: Rule(
        8, 4, "most of the bytes with the feed-forward layers; errors of many weights cancel in a product", 8
    ),
    FEED_FORWARD: Rule(8, 4, "as the projections", 8),
    GATE: Rule(
        8, 8, "an error scales all that the linear state gives; 4-bit gates took a hybrid's perplexity from 10 to 65"
    ),
    FEATURE_MAP: Rule(16, 16, "its errors stay in the state and add up over the context; a fiftieth of the bytes"),
    ROUTER: Rule(16, 16, "an error chooses other experts; a thousandth of the bytes"),
    NORM: Rule(None, None, "vectors: no bytes to win"),
    EMBEDDING: Rule(8, 8, "read one row a token, so fewer bits win no time; shared with the head where they are tied"),
    HEAD: Rule(8, 8, "its errors go into the logits directly"),
}
"""By role; 16 bits are half precision."""


@dataclass(frozen=True)
class Quantization:
    """Requested quantization.

    Args:
        scheme: One of SCHEMES.
        method: Rounding method for weights of fewer than 8 bits (quantizers.py); 8 bits are always rounded to nearest.
        block_size: Number of weights along a product's inputs that share scale and zero point; 0: the target's default, or, for 8 bits
            without blocks, all weights of an output.
        lora: One of LORA: an adapter's pairs stay separate, as two thin products, or are merged into the weight before rounding.
        layout: The target's form of low-bit weights.
        adapters: Products accept LoRA pairs at run time.
        to: The target's name, for messages.
    """

    scheme: str
    method: str = DEFAULT_METHOD
    block_size: int = 0
    lora: str = DEFAULT_LORA
    layout: Layout = ONNXRUNTIME
    adapters: bool = False
    to: str = "onnx"
    has_block: bool = field(init=False)

    def __post_init__(self) -> None:
        options = (
            ("quantize", self.scheme, SCHEMES),
            ("quantize-method", self.method, METHODS),
            ("lora", self.lora, LORA),
        )
        for flag, value, known in options:
            if value not in known:
                raise unknown(value, known, f"--{flag} {value}")
        if self.adapters and not self.layout.adapters:
            raise ConfigError(f"--adapters is for --to onnx, not for --to {self.to}; add the adapter with --overlay.")
        object.__setattr__(self, "has_block", bool(self.block_size))
        sizes = self.layout.block_sizes
        if self.float8:
            self._check_float8()
            return
        if self.scheme == "int8" and not self.layout.blocks_of_eight:
            if self.block_size:
                raise ConfigError(
                    f"--quantize-block is for --quantize int4: --to {self.to} has a scale for each output of 8-bit weights."
                )
            return
        if not self.block_size:
            object.__setattr__(self, "block_size", sizes[0])
        if self.block_size not in sizes:
            raise ConfigError(
                f"--quantize-block {self.block_size}: {self.layout.form} has {', '.join(map(str, sorted(sizes)))}."
            )

    @property
    def float8(self) -> bool:
        return self.scheme == FLOAT8

    def _check_float8(self) -> None:
        """Raise ConfigError for options that e4m3 weights lack."""
        if not self.layout.float8:
            raise ConfigError(
                f"--quantize {self.scheme}: {self.layout.form} has no weights in e4m3. Export with --to onnx --dtype float16 and --arch "
                "sm_89 or later, or with --to trt for TensorRT 8.6, or take --quantize int8."
            )
        if self.block_size not in (0, FLOAT8_BLOCK):
            raise ConfigError(
                f"--quantize-block {self.block_size}: {self.scheme} has {FLOAT8_BLOCK}, or a scale for each output."
            )

    def fitted(self, sizes: Sequence[int]) -> Quantization:
        """With the commonest of the source's block `sizes`, if none was requested and the target supports it."""
        usual = next((size for size, _ in Counter(sizes).most_common(1)), 0)
        known = (FLOAT8_BLOCK,) if self.float8 else self.layout.block_sizes if self.block_size else ()
        if self.has_block or usual not in known:
            return self
        return replace(self, block_size=usual)

    def bits(self, role: str) -> int | None:
        """Bits of the weights of `role`; None: unchanged."""
        return None if role == EMBEDDING and not self.layout.rows else POLICY[role].bits(self.scheme)

    def block_of(self, bits: int, inputs: int) -> int:
        """Weights that share a scale, for a product with `inputs` in `bits`."""
        if self.float8:
            return self.block_size or inputs
        return self.block_size if bits < 8 or self.layout.blocks_of_eight else inputs


def account(
    policy: Quantization,
    roles: Mapping[str, str],
    forms: Mapping[str, tuple[int | None, str]],
    places: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The manifest's entry: the scheme and, for each role, the bits, rounding method and number of its weights.

    Args:
        forms: (bits, method) of quantized weights by name.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for (role, bits, method), count in Counter(
        (role, *forms.get(name, (None, None))) for name, role in roles.items()
    ).items():
        found.setdefault(role, []).append({"bits": bits, "method": method, "weights": count})
    return {
        "scheme": policy.scheme,
        "nodes": policy.layout.nodes,
        "block_size": policy.block_size or None,
        "lora": policy.lora,
        "roles": found,
        "adapters": list(places),
    }


def demand_float8(scheme: str | None, archs: Sequence[str]) -> None:
    """Raise UnsupportedError for e4m3 weights on GPUs without e4m3 products."""
    from still_kernels.dense_matmul.plan import FLOAT8_ARCH

    older = [arch for arch in archs if int(arch.removeprefix("sm_")) < FLOAT8_ARCH]
    if scheme == FLOAT8 and older:
        raise UnsupportedError(
            f"--quantize {FLOAT8} beside --arch {','.join(older)}: no matrix instructions for e4m3, which sm_{FLOAT8_ARCH} and later "
            "have. Name those alone with --arch, or take --quantize int8."
        )


def rounds_activations(manifest: Mapping[str, Any]) -> bool:
    """Whether the package's products round activations to 8 bits: ONNX Runtime's own do; ours do in float32 and with e4m3 weights."""
    quantization = manifest.get("quantization") or {}
    nodes = quantization.get("nodes")
    return (
        quantization.get("scheme") == FLOAT8
        or nodes == RUNTIME
        or (nodes == PLUGIN and manifest["model"]["dtype"] == "float32")
    )
