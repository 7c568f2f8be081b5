# still-export for NVIDIA GPUs: linearize, export with GPU kernels, ONNX Runtime's CUDA provider, TensorRT. From the repository's root:
#   docker build -f docker/cuda.Dockerfile -t still-export:cuda .
#   docker run --rm --gpus all -v "$PWD:/data" still-export:cuda doctor
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends cmake g++ make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
COPY . .
# onnxruntime and onnxruntime-gpu hold the same files: the second goes in alone, in the place of the first.
RUN pip install --no-cache-dir ".[cpu,train,gpu,trt]" \
    && pip uninstall -y onnxruntime \
    && pip install --no-cache-dir onnxruntime-gpu
WORKDIR /data
USER 1000
ENTRYPOINT ["still-export"]
