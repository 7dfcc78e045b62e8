#!/usr/bin/env bash
# The API with curl alone. OPENAI_BASE_URL and OPENAI_API_KEY select another server.
set -euo pipefail
url=${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}
server=${url%/v1}

request() { curl --silent --show-error --fail-with-body -H "Authorization: Bearer ${OPENAI_API_KEY:-none}" -H 'Content-Type: application/json' "$@"; }

echo "# Is the server ready?"
request "$server/health"
echo
echo "# Which models does it serve?"
request "$url/models"
echo
echo "# A chat completion. Without a model in the request the server uses the one that it serves."
request "$url/chat/completions" -d '{"messages": [{"role": "user", "content": "What is 12 + 7?"}], "temperature": 0, "max_tokens": 32}'
echo
echo "# The same as a stream of server-sent events."
request --no-buffer "$url/chat/completions" \
  -d '{"messages": [{"role": "user", "content": "What is 12 + 7?"}], "temperature": 0, "max_tokens": 32, "stream": true}'
echo "# The token ids of a text."
request "$server/tokenize" -d '{"prompt": "What is 12 + 7?"}'
echo
