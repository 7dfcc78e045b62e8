#!/bin/sh
# Generates the bus's password once and writes it into two files in DIRECTORY (default /secrets), each readable only by
# the user that needs it: `authorization.conf` for nats-server, `credentials` (user:password) for the services, which run
# as user 10001.
set -eu
umask 077
directory=${1:-/secrets}
[ -s "$directory/credentials" ] && exit 0
password=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
printf 'authorization { user: "antiphon", password: "%s" }\n' "$password" >"$directory/authorization.conf"
printf 'antiphon:%s' "$password" >"$directory/credentials.new"
chown 10001 "$directory/credentials.new"
# This file appears last and atomically: its presence means that both files are complete.
mv "$directory/credentials.new" "$directory/credentials"
