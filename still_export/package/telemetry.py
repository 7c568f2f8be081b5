"""ONNX Runtime sends no telemetry, unless the user's environment asks for it.

From version 1.31 on it also does so on Linux: a device id, the machine, the path of Python. It reads the variable when it is first
imported. Standard library only: exports copy this file into packages.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
