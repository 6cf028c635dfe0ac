#!/bin/sh
# The browser tests need a Chromium. Use the one that is there; install Debian's where we may; otherwise say
# in one line that these tests do not run and how to get them. With CI=true a missing browser is a failure.
set -u

found() {
  if [ -n "${FASTERQK_CHROMIUM:-}" ]; then
    [ -x "$FASTERQK_CHROMIUM" ]
    return
  fi
  for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null 2>&1 && return 0
  done
  return 1
}

found && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing chromium for the browser tests"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } \
    >/dev/null 2>&1
  found && exit 0
fi
echo "browser tests do not run: no Chromium found; install one (apt-get install chromium) or set FASTERQK_CHROMIUM" >&2
case "${CI:-}" in
  true | True | TRUE | 1) exit 1 ;;
esac
exit 0
