#!/bin/sh
# Draws the passwords of the bus once: make_credentials.sh [DIRECTORY] (default /secrets). It writes
#
#   server/passwords.conf    all passwords, for nats-server (users.conf names them)
#   ROLE/credentials         user:password of one kind of service, of `launcher`, which starts models in containers of
#                            their own, of `observer`, which may only read, and of `setup`, which makes the stores
#   server/routes.conf       if NATS_SERVERS="HOST HOST HOST" names the servers of a cluster in containers: their routes
#                            and the password among them
#
# A service gets its own folder only. The files are readable by their owner only: user 10001, as which the services run
# (OWNER; empty: whoever runs this).
set -eu
umask 077
directory=${1:-/secrets}
owner=${OWNER-10001}
roles="gateway tokenizer engine detokenizer vision launcher observer setup"
draw() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
routes() {
  password=$(draw)
  printf 'authorization { user: "route", password: "%s", timeout: 5 }\nroutes: [\n' "$password"
  for server in $NATS_SERVERS; do printf '  "nats://route:%s@%s:6222"\n' "$password" "$server"; done
  printf ']\n'
}
mkdir -p "$directory/server"
if [ -n "${NATS_SERVERS-}" ] && [ ! -s "$directory/server/routes.conf" ]; then
  routes >"$directory/server/routes.conf"
fi
complete() { for role in $roles; do [ -s "$directory/$role/credentials" ] || return 1; done; }
complete && exit 0
: >"$directory/server/passwords.conf"
for role in $roles; do
  password=$(draw)
  mkdir -p "$directory/$role"
  printf '%s_password: "%s"\n' "$role" "$password" >>"$directory/server/passwords.conf"
  printf '%s:%s' "$role" "$password" >"$directory/$role/credentials"
  if [ -n "$owner" ]; then chown -R "$owner" "$directory/$role"; fi
done
