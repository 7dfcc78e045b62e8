#!/bin/sh
# Draws the bus's passwords once and writes the files that `base` makes Secrets of: make_secrets.sh [DIRECTORY].
set -eu
here=$(dirname "$0")
# The servers of `cluster`; `base` has one server and does not read their routes.
export NATS_SERVERS="nats-0.nats-servers nats-1.nats-servers nats-2.nats-servers"
OWNER="" exec sh "$here/../nats/make_credentials.sh" "${1:-$here/base/secrets}"
