# The image service: decodes images and runs the model's vision encoder.
FROM python:3.11-slim-bookworm

WORKDIR /app
# Package index for torch, as in engine.Dockerfile.
ARG TORCH_INDEX_URL=
COPY pyproject.toml constraints.txt infra/docker/hashes.txt infra/docker/group_requirements.py /build/
RUN python /build/group_requirements.py --hashes=/build/hashes.txt /build/pyproject.toml vision > /build/requirements.txt \
 && pip install -q --no-cache-dir --root-user-action=ignore --require-hashes -r /build/requirements.txt \
 && pip install -q --no-cache-dir --root-user-action=ignore ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} \
    -c /build/constraints.txt torch \
 && rm -r /build \
 && useradd --uid 10001 --home-dir /tmp antiphon \
 && install -d -o antiphon /models
COPY antiphon/__init__.py antiphon/
COPY shared antiphon/shared
COPY services/__init__.py antiphon/services/
COPY services/vision antiphon/services/vision
COPY infra/docker/healthcheck.py ./
RUN python -m compileall -q antiphon
USER 10001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["python", "healthcheck.py", "vision"]
ENTRYPOINT ["python", "-m", "antiphon.services.vision"]
