"""An agent of a few lines: what a model says in `<edit>…</edit>` goes into `f.py`, what comes of it is told, and so on.

It knows nothing of slime: standard input is an issue, `AGENT_URL` an OpenAI-compatible service, `AGENT_KEY` its key.
"""

import http.client
import json
import os
import re
import subprocess
import sys
from urllib.parse import urlsplit

TURNS = 2
EDIT = re.compile(r"<edit>(.*?)</edit>", re.DOTALL)


def ask(messages):
    """What the model says to a conversation."""
    address = urlsplit(os.environ["AGENT_URL"])
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=900)
    headers = {"Authorization": f"Bearer {os.environ['AGENT_KEY']}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps({"model": "any", "messages": messages}), headers)
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise SystemExit(f"the service answered {response.status}: {body.decode(errors='replace')}")
    return json.loads(body)["choices"][0]["message"]["content"] or ""


def outcome():
    """f(2), or what is wrong with it."""
    program = "exec(open('f.py').read()); print(f(2))"
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-B", "-c", program], capture_output=True, text=True, timeout=10
        )
    except subprocess.TimeoutExpired:
        return "no end"
    return (done.stdout or done.stderr).strip().rpartition("\n")[2][:40]


def main():
    """Raises SystemExit where the service refuses."""
    messages = [{"role": "user", "content": sys.stdin.read()}]
    for _ in range(TURNS):
        said = ask(messages)
        edits = EDIT.findall(said)
        if not edits:
            return
        with open("f.py", "w") as file:
            file.write(f"def f(x):\n    return {edits[-1]}\n")
        messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": outcome()}]


if __name__ == "__main__":
    main()
