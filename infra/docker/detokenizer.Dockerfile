# The detokenizer: converts token ids to text as they arrive. Needs the package tokenizers, but not torch.
FROM python:3.11-slim-bookworm

WORKDIR /app
COPY pyproject.toml infra/docker/hashes.txt infra/docker/group_requirements.py /build/
RUN python /build/group_requirements.py --hashes=/build/hashes.txt /build/pyproject.toml detokenizer > /build/requirements.txt \
 && pip install -q --no-cache-dir --root-user-action=ignore --require-hashes -r /build/requirements.txt \
 && rm -r /build \
 && useradd --uid 10001 --home-dir /tmp antiphon \
 && install -d -o antiphon /models
COPY antiphon/__init__.py antiphon/
COPY shared antiphon/shared
COPY services/__init__.py antiphon/services/
COPY services/detokenizer antiphon/services/detokenizer
COPY infra/docker/healthcheck.py ./
RUN python -m compileall -q antiphon
USER 10001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["python", "healthcheck.py", "detokenizer"]
ENTRYPOINT ["python", "-m", "antiphon.services.detokenizer"]
