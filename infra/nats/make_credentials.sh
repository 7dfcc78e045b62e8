#!/bin/sh
# Draws the bus's password once and writes it in two forms into DIRECTORY (default /secrets), each readable by its only
# reader: `authorization.conf` for nats-server, `credentials` (user:password) for the services, which run as user 10001.
set -eu
umask 077
directory=${1:-/secrets}
[ -s "$directory/credentials" ] && exit 0
password=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
printf 'authorization { user: "antiphon", password: "%s" }\n' "$password" >"$directory/authorization.conf"
printf 'antiphon:%s' "$password" >"$directory/credentials.new"
chown 10001 "$directory/credentials.new"
# Last, and in one step: the file's presence says that both are whole.
mv "$directory/credentials.new" "$directory/credentials"
