#!/bin/sh
# Starts one server of a NATS cluster with cluster.conf, whose head names the variables: start_node.sh [NATS-SERVER]
set -eu
directory=$(cd "$(dirname "$0")" && pwd)
for name in NATS_NAME NATS_ADDRESS NATS_ROUTES NATS_STORE NATS_TLS; do
  eval "value=\${$name-}"
  [ -n "$value" ] || { echo "$name is not set: see $directory/cluster.conf" >&2; exit 78; }
done
export NATS_TLS_CA="$NATS_TLS/ca.pem" NATS_TLS_CERT="$NATS_TLS/$NATS_NAME.pem" NATS_TLS_KEY="$NATS_TLS/$NATS_NAME.key"
for file in "$NATS_TLS_CA" "$NATS_TLS_CERT" "$NATS_TLS_KEY"; do
  [ -r "$file" ] || { echo "$file cannot be read: make it with make_route_certificates.sh" >&2; exit 78; }
done
[ -r "$directory/secrets/passwords.conf" ] || {
  echo "$directory/secrets/passwords.conf is missing: make_credentials.sh draws it as server/passwords.conf" >&2; exit 78
}
exec "${1:-nats-server}" --config "$directory/cluster.conf"
