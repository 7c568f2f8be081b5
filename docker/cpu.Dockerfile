# still-export for ONNX Runtime on the CPU: export, run, serve, verify, linearize small models. Build it from the repository's root:
#   docker build -f docker/cpu.Dockerfile -t still-export .
#   docker run --rm -v "$PWD:/data" still-export run DIR --prompt "Once upon a time"
FROM python:3.11-slim-bookworm
# A compiler, for still-export kernels build.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends cmake g++ make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# The CPU's torch first: it is a tenth of the one with CUDA. Another index that has it: --build-arg TORCH_INDEX=URL
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir torch==2.13.0 --index-url "$TORCH_INDEX" \
    && pip install --no-cache-dir -c constraints.txt ".[cpu,train]"
WORKDIR /data
USER 1000
ENTRYPOINT ["still-export"]
