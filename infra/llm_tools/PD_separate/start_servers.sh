#!/bin/sh
# Starts one instance of a deployment with separate prefill and decode instances:
#
#     GLOBAL_RANK_TABLE_FILE_PATH=… RANK_TABLE_FILE_PATH=… [NODE_PORTS=8088,8089] [USE_OPENAI=1] \
#         sh $LLM_TOOLS_PATH/PD_separate/start_servers.sh --model=DIR --port=8088 …
#
# The rank tables decide the role. The same as `antiphon start-role`, which has all flags of `antiphon serve`.
# ANTIPHON_PYTHON names the Python that has Antiphon; without it, that of the release or else of PATH is used.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
for root in "$here/../.." "$here/../../.."; do
    [ -f "$root/antiphon/cli.py" ] && break
    root=
done

python=${ANTIPHON_PYTHON:-}
if [ -z "$python" ] && [ -n "$root" ] && [ -x "$root/.venv/bin/python" ]; then
    python=$root/.venv/bin/python
fi
if [ -z "$python" ]; then
    python=$(command -v python3 || command -v python) || {
        echo "start_servers.sh: there is no Python: install it, or name it with ANTIPHON_PYTHON" >&2
        exit 1
    }
fi
if [ -n "$root" ]; then
    PYTHONPATH=$(cd "$root" && pwd)${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
fi
exec "$python" -m antiphon start-role "$@"
