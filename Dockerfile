# The server alone: no torch. Build: docker build -t crossbatch .
# Run: docker run --user "$(id -u)" --stop-timeout 15 -v /srv/crossbatch:/data -p 50051:50051 crossbatch \
#          --model /data/model.onnx --galleries /data/galleries --host 0.0.0.0 --insecure
# The user must be able to write the galleries; the time to stop is --grace and some.
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE crossbatch.py ./
COPY protos protos
COPY serving serving
COPY training training
RUN python -m venv /opt/crossbatch && /opt/crossbatch/bin/pip install --no-cache-dir ".[cpu,web]"

FROM python:3.12-slim
COPY --from=build /opt/crossbatch /opt/crossbatch
RUN useradd --create-home crossbatch
USER crossbatch
EXPOSE 50051
ENTRYPOINT ["/opt/crossbatch/bin/crossbatch", "serve"]
