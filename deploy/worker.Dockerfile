# SGLang's official image with Toolgap beside it. From the top of the repository:
#
#     docker build -f deploy/worker.Dockerfile -t toolgap-worker .
#
# Another CUDA's variant of the same release: --build-arg SGLANG_IMAGE=lmsysorg/sglang:v0.5.23-...
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23

FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${SGLANG_IMAGE}

# What SGLang has stays; with another release of it Toolgap would not turn itself on.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    for wheel in /wheels/*.whl; do python3 -m pip install --no-cache-dir "${wheel}[store]"; done \
    && python3 -c "from importlib.metadata import version; assert version('sglang') == '0.5.23'"

# Caches of what SGLang and Toolgap compile are below HOME; L3 is a volume.
RUN useradd --uid 10001 --create-home toolgap \
    && install -d -o toolgap -g toolgap /var/lib/toolgap /var/lib/toolgap/kv /models
ENV HF_HOME=/models \
    SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=/var/lib/toolgap/kv
USER 10001:10001
WORKDIR /home/toolgap

EXPOSE 30000
# As long as a large model takes to load, it may be unhealthy. SGLang takes up to 20 s for an answer.
HEALTHCHECK --interval=30s --timeout=25s --start-period=30m --retries=4 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:30000/health', timeout=24)"]

# Arguments: Toolgap's settings, then -- and SGLang's.
ENTRYPOINT ["toolgap", "serve"]
