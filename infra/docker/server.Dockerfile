# The whole server in one image, for one machine: the bus and all services.
#
#   docker build -f infra/docker/server.Dockerfile -t antiphon . && docker run -p 8000:8000 antiphon
#
# serves the demo model, or another: `docker run … antiphon serve --host=0.0.0.0 --model=org/model`. The stage `run` is
# the image that build_image.sh makes, which starts `antiphon run`.
#
# BASE_IMAGE must be a Debian or Ubuntu with Python 3.11 or newer as `python`.
ARG BASE_IMAGE=python:3.11-slim-bookworm

# Compiles the CPU backend for all processors of this architecture, because the final image has no compiler.
FROM ${BASE_IMAGE} AS compiled
USER root
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends g++ >/dev/null && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY antiphon/__init__.py antiphon/
COPY shared/__init__.py shared/version.py shared/limits.py shared/cache_dirs.py antiphon/shared/
COPY services/__init__.py antiphon/services/
COPY services/engine/__init__.py antiphon/services/engine/
COPY services/engine/backends/__init__.py antiphon/services/engine/backends/
COPY services/engine/backends/cpu antiphon/services/engine/backends/cpu
RUN python -m antiphon.services.engine.backends.cpu --all

FROM ${BASE_IMAGE} AS run

USER root
WORKDIR /app
# Package index for torch, as in engine.Dockerfile. Empty: PyPI, whose torch includes CUDA.
ARG TORCH_INDEX_URL=
COPY pyproject.toml constraints.txt infra/docker/hashes.txt infra/docker/group_requirements.py /build/
RUN python /build/group_requirements.py --hashes=/build/hashes.txt /build/pyproject.toml project > /build/requirements.txt \
 && pip install -q --no-cache-dir --root-user-action=ignore --require-hashes -r /build/requirements.txt \
 && pip install -q --no-cache-dir --root-user-action=ignore ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} \
    -c /build/constraints.txt torch \
 && rm -r /build \
 && { id -u 10001 >/dev/null 2>&1 || useradd --uid 10001 --home-dir /tmp antiphon; } \
 && install -d -o 10001 /models /data/model
COPY shared shared
COPY services services
COPY antiphon antiphon
COPY infra/llm_tools llm_tools
COPY infra/docker/healthcheck.py ./
COPY --from=compiled /app/antiphon/services/engine/backends/cpu/compiled services/engine/backends/cpu/compiled
RUN python -m compileall -q shared services antiphon
ENV HF_HOME=/models LLM_TOOLS_PATH=/app/llm_tools
USER 10001
EXPOSE 8501
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "antiphon"]
CMD ["run"]

FROM run AS serve
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["python", "healthcheck.py", "gateway"]
CMD ["serve", "--host=0.0.0.0", "--port=8000"]
