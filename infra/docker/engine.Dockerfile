# The engine: runs the model.

# Compiles the CPU backend for all processors of this architecture, because the final image has no compiler.
FROM python:3.11-slim-bookworm AS compiled
# As in server.Dockerfile, whose build then takes the compiled libraries from Docker's cache.
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

FROM python:3.11-slim-bookworm

WORKDIR /app
# Package index for torch, e.g. https://download.pytorch.org/whl/cpu (small, for a machine without a GPU).
# Empty: PyPI, whose torch includes CUDA.
ARG TORCH_INDEX_URL=
COPY pyproject.toml constraints.txt infra/docker/hashes.txt infra/docker/group_requirements.py /build/
RUN python /build/group_requirements.py --hashes=/build/hashes.txt /build/pyproject.toml engine > /build/requirements.txt \
 && pip install -q --no-cache-dir --root-user-action=ignore --require-hashes -r /build/requirements.txt \
 && pip install -q --no-cache-dir --root-user-action=ignore ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} \
    -c /build/constraints.txt torch \
 && rm -r /build \
 && useradd --uid 10001 --home-dir /tmp antiphon \
 && install -d -o antiphon /models
COPY antiphon/__init__.py antiphon/
COPY shared antiphon/shared
COPY services/__init__.py antiphon/services/
COPY services/engine antiphon/services/engine
COPY --from=compiled /app/antiphon/services/engine/backends/cpu/compiled antiphon/services/engine/backends/cpu/compiled
COPY infra/docker/healthcheck.py ./
RUN python -m compileall -q antiphon
USER 10001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["python", "healthcheck.py", "engine"]
ENTRYPOINT ["python", "-m", "antiphon.services.engine"]
