#!/usr/bin/env bash
# Installs the servers that `make bench PEERS=...` measures beside mortard: bench/peers/install.sh [nats] [nsq] [redis] [rabbitmq]
# (all without arguments). NATS and NSQ are built with Go into bench/.cache/bin; Redis, RabbitMQ and fio are Debian packages, which
# takes root. Nothing else in this repository needs any of them, and no service is left running.
set -euo pipefail

NATS_VERSION=v2.15.2
NSQ_VERSION=v1.3.0
# NSQ replaces this module in its own go.mod, which only counts when it is the main module.
NSQ_SVC_REPLACE=github.com/judwhite/go-svc=github.com/mreiferson/go-svc@v1.2.2-0.20210815184239-7a96e00010f6

cache=$(cd "$(dirname "$0")/.." && pwd)/.cache
mkdir -p "$cache/bin"
export GOFLAGS= GOBIN="$cache/bin"

nats() {
  [ -x "$cache/bin/nats-server" ] && "$cache/bin/nats-server" --version | grep -qF "$NATS_VERSION" && return
  (cd "$cache" && go install "github.com/nats-io/nats-server/v2@$NATS_VERSION")
}

nsq() {
  [ -x "$cache/bin/nsqd" ] && return
  local dir
  dir=$(mktemp -d "$cache/nsq-XXXXXX")
  trap 'rm -rf "$dir"' RETURN
  cd "$dir"
  go mod init build 2>/dev/null
  go mod edit -require "github.com/nsqio/nsq@$NSQ_VERSION" -replace "$NSQ_SVC_REPLACE"
  go build -mod=mod -o "$cache/bin/nsqd" github.com/nsqio/nsq/apps/nsqd
  cd "$cache"
}

# Debian starts a package's service at once; policy-rc.d (101: forbidden) keeps it from that.
debian() {
  local policy=/usr/sbin/policy-rc.d made=
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    made=1
  fi
  apt-get install -y --no-install-recommends "$@" || { apt-get update && apt-get install -y --no-install-recommends "$@"; } || failed=1
  [ -z "$made" ] || rm -f "$policy"
  [ -z "${failed:-}" ]
}

redis() { [ -x /usr/bin/redis-server ] || debian redis-server; }
rabbitmq() { [ -x /usr/lib/rabbitmq/bin/rabbitmq-server ] || debian rabbitmq-server; }

[ $# -gt 0 ] || set -- nats nsq redis rabbitmq
for peer in "$@"; do
  case "$peer" in
  nats | nsq | redis | rabbitmq) "$peer" ;;
  *)
    echo "unknown peer $peer: use some of nats nsq redis rabbitmq" >&2
    exit 2
    ;;
  esac
done
command -v fio >/dev/null || debian fio || echo "without fio the harness's own disk probe is all there is" >&2
echo "installed: $*"
