#!/bin/sh
# Draws the passwords of the bus once: make_credentials.sh [DIRECTORY] (default /secrets). It writes
#
#   server/passwords.conf    all passwords, for nats-server (users.conf names them)
#   ROLE/credentials         user:password of one kind of service, and of `observer`, which may only read
#
# A service gets its own folder only. The files are readable by their owner only: user 10001, as which the services run
# (OWNER; empty: whoever runs this).
set -eu
umask 077
directory=${1:-/secrets}
owner=${OWNER-10001}
roles="gateway tokenizer engine detokenizer vision observer"
complete() { for role in $roles; do [ -s "$directory/$role/credentials" ] || return 1; done; }
complete && exit 0
mkdir -p "$directory/server"
: >"$directory/server/passwords.conf"
for role in $roles; do
  password=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
  mkdir -p "$directory/$role"
  printf '%s_password: "%s"\n' "$role" "$password" >>"$directory/server/passwords.conf"
  printf '%s:%s' "$role" "$password" >"$directory/$role/credentials"
  if [ -n "$owner" ]; then chown -R "$owner" "$directory/$role"; fi
done
