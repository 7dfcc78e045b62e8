# The load balancer of the compose deployment: HAProxy from Debian's packages, on the base image of the other images.
FROM python:3.11-slim-bookworm

RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends haproxy >/dev/null && rm -rf /var/lib/apt/lists/*
COPY haproxy.cfg /etc/haproxy/haproxy.cfg
RUN haproxy -c -q -f /etc/haproxy/haproxy.cfg
USER haproxy
EXPOSE 8000
# On SIGUSR1 HAProxy accepts no new connections and lets open ones finish (at most `hard-stop-after`).
STOPSIGNAL SIGUSR1
ENTRYPOINT ["haproxy", "-db", "-f", "/etc/haproxy/haproxy.cfg"]
