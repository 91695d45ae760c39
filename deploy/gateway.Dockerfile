# The gateway alone: no SGLang, no GPU. From the top of the repository:
#
#     docker build -f deploy/gateway.Dockerfile -t toolgap-gateway .
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# With the versions that the tests run with.
# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    --mount=type=bind,source=requirements/engine-cpu.txt,target=/locked.txt \
    for wheel in /wheels/*.whl; do pip install --no-cache-dir --constraint /locked.txt "${wheel}[gateway]"; done \
    && useradd --uid 10001 --no-create-home toolgap
# It writes nothing, unless it is told to record.
ENV PYTHONDONTWRITEBYTECODE=1 \
    TOOLGAP_GATEWAY_HOST=0.0.0.0
USER 10001:10001

EXPOSE 30800
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:30800/healthz', timeout=2)"]

# Settings: options, or TOOLGAP_GATEWAY_* variables. SIGTERM lets running answers end.
ENTRYPOINT ["toolgap", "gateway"]
