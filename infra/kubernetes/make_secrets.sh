#!/bin/sh
# Draws the bus's passwords once and writes the files that `base` makes Secrets of: make_secrets.sh [DIRECTORY].
set -eu
here=$(dirname "$0")
OWNER="" exec sh "$here/../nats/make_credentials.sh" "${1:-$here/base/secrets}"
