# still-export in vLLM's own image, for KServe, llm-d and Ray. From the repository's root:
#   docker build -f docker/vllm.Dockerfile -t still-export:vllm .
#   docker run --rm --gpus all -p 127.0.0.1:8000:8000 -v "$PWD:/data" still-export:vllm STILL
FROM vllm/vllm-openai:v0.26.0
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir ".[vllm]"
WORKDIR /data
USER 1000
ENTRYPOINT ["vllm", "serve"]
