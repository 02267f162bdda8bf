# The server, without torch; docs/deployment.md tells how to build and run it, and what is in it.
#   docker build -t crossbatch:0.1.0-cpu .
#   docker build -t crossbatch:0.1.0-gpu --target gpu .
# scripts/image/check.py carries out these lines without Docker, on a Debian of its own, and uses what comes of them.
FROM debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171 AS base
RUN --mount=type=bind,source=scripts/image,target=/image /image/python

FROM base AS source
RUN --mount=type=bind,source=scripts/image,target=/image /image/python python3-venv
WORKDIR /source
COPY pyproject.toml README.md LICENSE crossbatch.py ./
COPY protos protos
COPY serving serving
COPY training training
COPY scripts/image scripts/image

FROM source AS build-cpu
RUN scripts/image/install cpu,web,trace,heic,milvus /opt/crossbatch

FROM source AS build-gpu
RUN scripts/image/install gpu,web,trace,heic,milvus /opt/crossbatch "onnxruntime-gpu[cuda,cudnn]"

FROM base AS server
LABEL org.opencontainers.image.title="crossbatch" \
      org.opencontainers.image.description="Image search over gRPC: the server, without torch" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.base.name="docker.io/library/debian:bookworm-20260824-slim"
ENV PATH=/opt/crossbatch/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    PYTHONUNBUFFERED=1
# A number, by which Kubernetes sees that it is not root; no user of the system has it.
USER 10001:10001
EXPOSE 50051
HEALTHCHECK --interval=30s --timeout=10s --start-period=5m --start-interval=2s \
    CMD ["python", "-c", "from serving.client import Client; raise SystemExit(not Client('127.0.0.1:50051').ready())"]
ENTRYPOINT ["crossbatch", "serve"]

# ONNX Runtime 1.31 takes CUDA 13 and cuDNN 9, FAISS 1.15 CUDA 12; both are in the image, by NVIDIA's packages on PyPI.
# The machine has NVIDIA's driver, 580 or newer, and its container toolkit.
FROM server AS gpu
COPY --from=build-gpu /opt/crossbatch /opt/crossbatch
ENV LD_LIBRARY_PATH=/opt/crossbatch/lib/python3.11/site-packages/nvidia/cu13/lib:/opt/crossbatch/lib/python3.11/site-packages/nvidia/cudnn/lib \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_REQUIRE_CUDA="cuda>=13.0"
LABEL crossbatch.cuda="13 (ONNX Runtime), 12 (FAISS)" \
      crossbatch.cudnn="9" \
      crossbatch.driver="580 or newer"

# The last one, which is built where no --target is given.
FROM server AS cpu
COPY --from=build-cpu /opt/crossbatch /opt/crossbatch
