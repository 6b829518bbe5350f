"""Harnesses in a sandbox of this machine, with programs in the place of agents: what they are given, and whom they reach."""

import asyncio
import json
import sys
import tarfile
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slime.agent.adapters.asking import READ_TIMEOUT_S
from slime.agent.harness import (
    BaseHarness,
    ClaudeCodeHarness,
    CodexHarness,
    HarnessContext,
    ensure_agent_user,
    install_node22,
    install_npm_cli,
    run_agent,
)
from slime.agent.sandbox import EXIT_TIME_BUDGET_EXCEEDED, LocalSandbox, SandboxError
from slime.utils.errors import UserError
from tests.support.processes.clocks import run_in_no_time

# Notes what it was given, and asks what it was told to ask, as the real one does: its first words say how.
AGENT = """\
#!{python}
import json, os, sys, tomllib, urllib.request
prompt = sys.stdin.read()
if os.path.basename(sys.argv[0]) == "claude":
    url, token = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", os.environ["ANTHROPIC_AUTH_TOKEN"]
    model = sys.argv[sys.argv.index("--model") + 1]
else:
    with open(os.path.expanduser("~/.codex/config.toml"), "rb") as file:
        config = tomllib.load(file)
    provider = config["model_providers"][config["model_provider"]]
    url, token, model = provider["base_url"] + "/chat/completions", os.environ[provider["env_key"]], config["model"]
body = json.dumps({{"model": model, "messages": [{{"role": "user", "content": prompt}}]}}).encode()
request = urllib.request.Request(url, body, {{"Authorization": "Bearer " + token, "Content-Type": "application/json"}})
answer = json.load(urllib.request.urlopen(request, timeout=30))
with open("worked", "w") as file:
    json.dump({{"argv": sys.argv[1:], "said": answer, "env": dict(os.environ)}}, file)
print("done")
sys.exit(int(os.environ.get("STATUS", "0")))
"""


class Adapter:
    """A server that notes what it is asked: (path, token, body)."""

    def __enter__(self):
        asked = self.asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                asked.append((self.path, self.headers["Authorization"], body))
                answer = json.dumps({"answer": len(asked)}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(30)


@pytest.fixture(autouse=True)
def without_settings(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith(("SLIME_AGENT_", "SWE_")):
            monkeypatch.delenv(name)


@pytest.fixture
def programs(tmp_path):
    """A directory of programs, for PATH of a sandbox."""
    directory = tmp_path / "programs"
    directory.mkdir()
    for name in ("claude", "codex"):
        put(directory / name, AGENT.format(python=sys.executable))
    return directory


def put(path, text):
    path.write_text(text)
    path.chmod(0o755)


def sandbox_with(programs):
    path = f"{programs}:{sys.executable.rpartition('/')[0]}:/usr/bin:/bin"
    return LocalSandbox(network="host", readable=[programs], env={"PATH": path})


def worked(programs, harness, **options):
    """(status of a run, what the agent noted, the home directory's files, what the adapter was asked)."""
    harness.poll_interval_sec = 0.05

    async def main(url):
        async with sandbox_with(programs) as sb:
            await sb.exec("mkdir work")
            code = await harness.run(
                sb, **{"workdir": "work", "session_id": "session-7", "adapter_url": url, "time_budget_sec": 60,
                       "prompt": "Mend it's --loop", **options}
            )  # fmt: skip
            _, files, _ = await sb.exec('cd "$HOME" && find . -type f | sort')
            noted = json.loads(await sb.read_file("work/worked"))
            texts = {name: await sb.read_file(f"home/{name}") for name in files.split()}
            return code, noted, texts

    with Adapter() as adapter:
        return *asyncio.run(main(f"{adapter.url}/")), adapter.asked


def test_claude_code_reaches_the_adapter_by_its_session(programs):
    code, noted, files, asked = worked(programs, ClaudeCodeHarness())
    message = [{"role": "user", "content": "Mend it's --loop"}]
    body = {"model": "slime-actor", "messages": message}
    assert code == 0 and asked == [("/v1/messages", "Bearer session-7", body)] and noted["said"] == {"answer": 1}
    assert noted["argv"] == ["--print", "--dangerously-skip-permissions", "--model", "slime-actor"]
    assert json.loads(files["./.claude.json"])["hasCompletedOnboarding"] is True
    assert {"ANTHROPIC_SMALL_FAST_MODEL": "slime-actor", "DISABLE_AUTOUPDATER": "1"}.items() <= noted["env"].items()
    assert int(noted["env"]["API_TIMEOUT_MS"]) > 1000 * READ_TIMEOUT_S


def test_codex_reaches_the_adapter_by_its_configuration(programs):
    code, noted, files, asked = worked(programs, CodexHarness())
    assert code == 0
    assert [(path, token) for path, token, _ in asked] == [("/v1/chat/completions", "Bearer session-7")]
    words = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-"]
    assert noted["argv"] == words
    config = tomllib.loads(files["./.codex/config.toml"])
    provider = config["model_providers"]["slime"]
    assert config["model"] == "slime-actor" and provider["wire_api"] == "chat"
    assert provider["stream_idle_timeout_ms"] > 1000 * READ_TIMEOUT_S
    assert "session-7" not in files["./.codex/config.toml"]


@pytest.mark.parametrize(("name", "harness"), [("CC", ClaudeCodeHarness), ("CODEX", CodexHarness)])
def test_words_and_variables_can_be_added(programs, monkeypatch, name, harness):
    monkeypatch.setenv(f"SLIME_AGENT_{name}_EXTRA_ARGS", "--more 'two words'")
    monkeypatch.setenv(f"SWE_{name}_EXTRA_ENVS", '{"STATUS": "5", "OWN": "x"}')
    code, noted, _, _ = worked(programs, harness())
    assert code == 5 and noted["env"]["OWN"] == "x"
    at = noted["argv"].index("--more")
    assert noted["argv"][at : at + 2] == ["--more", "two words"]
    # Standard input is what Codex reads by its last word.
    assert name == "CC" or noted["argv"][-1] == "-"


def test_an_agent_that_ends_badly_is_logged(programs, monkeypatch, caplog):
    monkeypatch.setenv("SLIME_AGENT_CC_EXTRA_ENVS", '{"STATUS": "3"}')
    assert worked(programs, ClaudeCodeHarness())[0] == 3
    assert "claude-code ended with status 3" in caplog.text and ": done" in caplog.text


class Own(BaseHarness):
    name = "own"

    async def launch_and_wait(self, sb, ctx, prompt, time_budget_sec):
        return await run_agent(
            sb, name=self.name, cmd="cat > got; pwd; sleep 1000", ctx=ctx, prompt=prompt, time_budget_sec=time_budget_sec,
            poll_interval_sec=0.05,
        )  # fmt: skip


def test_a_harness_of_ones_own_is_one_method_and_ends_over_budget():
    async def main():
        async with LocalSandbox() as sb:
            await sb.exec("mkdir work")
            code = await Own().run(
                sb, workdir="work", session_id="s", adapter_url="http://nowhere", time_budget_sec=1, prompt="p\n" * 9
            )
            return code, await sb.read_file("work/got")

    assert asyncio.run(main()) == (EXIT_TIME_BUDGET_EXCEEDED, "p\n" * 9)


def test_a_harness_without_a_launch_says_so():
    with pytest.raises(NotImplementedError, match="BaseHarness has no launch_and_wait"):
        asyncio.run(BaseHarness().launch_and_wait(None, HarnessContext("w", "s", "u"), "", 1))


# -- what is run in a sandbox before --------------------------------------------------------------------------------------


class Scripted:
    """A sandbox whose commands end with the statuses that a test has written down, 0 when none is left."""

    sandbox_id = "scripted"

    def __init__(self, *codes):
        self.codes, self.commands, self.files = list(codes), [], {}

    async def exec(self, cmd, **options):
        if "TMPDIR" in cmd and "tar" not in cmd:
            return 0, "/tmp", ""
        self.commands.append((cmd, options.get("user", "root")))
        code = self.codes.pop(0) if self.codes else 0
        if code and options.get("check"):
            raise SandboxError(f"status {code}")
        return code, "", ""

    async def write_file(self, path, content, **options):
        self.files[path] = content


def test_agents_have_a_user_of_their_own_where_there_are_users():
    sb = Scripted()
    asyncio.run(ensure_agent_user(sb, user="agent", workdir="/my repo"))
    ((cmd, user),) = sb.commands
    assert user == "root" and "useradd --create-home agent" in cmd and "chown -R agent: '/my repo'" in cmd
    sb = Scripted()
    sb.single_user = True
    asyncio.run(ensure_agent_user(sb, user="agent", workdir="/w"))
    assert sb.commands == []


@pytest.mark.parametrize(("failures", "tries"), [(0, 1), (2, 3), (3, 3)])
def test_npm_is_tried_three_times(failures, tries):
    sb = Scripted(*[1] * failures)
    install = install_npm_cli(sb, "@some/package@1", program="tool")
    if failures == 3:
        with pytest.raises(SandboxError, match="status 1"):
            run_in_no_time(install)
    else:
        run_in_no_time(install)
    assert len(sb.commands) == tries
    assert sb.commands[0][0] == "npm install --global --no-audit --no-fund @some/package@1 && command -v tool"


NPM = """\
#!/bin/sh
# Installs what it is given as a program of the directory that is npm's.
for last; do :; done
mkdir -p "$HOME/bin" && cp "$last" "$HOME/bin/tool" && chmod +x "$HOME/bin/tool"
"""


def test_a_package_of_this_machine_is_put_into_the_sandbox(programs, tmp_path):
    put(programs / "npm", NPM)
    (tmp_path / "tool-1.tgz").write_text("#!/bin/sh\necho I am the tool\n")

    async def main():
        async with sandbox_with(programs) as sb:
            sb._env["PATH"] += f":{sb.directory}/home/bin"
            await install_npm_cli(sb, "tool", program="tool", tarball=tmp_path / "tool-1.tgz")
            return await sb.exec("tool")

    assert asyncio.run(main())[1] == "I am the tool\n"


def test_a_package_without_the_program_is_refused(programs):
    put(programs / "npm", "#!/bin/sh\nexit 0\n")

    async def main():
        async with sandbox_with(programs) as sb:
            await install_npm_cli(sb, "tool", program="no-such-tool")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slime.agent.harness._NPM_WAIT_SECONDS", 0)
        with pytest.raises(SandboxError, match="command -v no-such-tool` ended with status"):
            asyncio.run(main())


def test_node_is_unpacked_from_a_file_of_this_machine_unless_one_is_there(programs, tmp_path, monkeypatch):
    put(programs / "node", "#!/bin/sh\necho v18.1.0\n")
    (tmp_path / "node-v22" / "bin").mkdir(parents=True)
    put(tmp_path / "node-v22" / "bin" / "node", "#!/bin/sh\necho v22.3.0\n")
    with tarfile.open(tmp_path / "node.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "node-v22", "node-v22")
    monkeypatch.setenv("SLIME_AGENT_NODE_TARBALL", str(tmp_path / "node.tar.gz"))

    async def main():
        async with sandbox_with(programs) as sb:
            await install_node22(sb, prefix=f"{sb.directory}/node")
            first = await sb.exec("node/bin/node; ls tmp")
            sb._env["PATH"] = f"{sb.directory}/node/bin:{sb._env['PATH']}"
            await install_node22(sb, prefix="/proc/nowhere")
            return first

    assert asyncio.run(main())[1] == "v22.3.0\n"


def test_node_is_fetched_where_no_file_is_given():
    sb = Scripted()
    asyncio.run(install_node22(sb))
    assert "curl -fsSL" in sb.commands[-1][0] and "latest-v22.x" in sb.commands[-1][0]


@pytest.mark.parametrize("harness", [ClaudeCodeHarness, CodexHarness])
def test_a_package_is_installed_by_its_harness(harness, monkeypatch, tmp_path):
    sb = Scripted()
    asyncio.run(harness().install_cli(sb))
    assert "npm install" in sb.commands[-1][0] and harness.name.partition("-")[0] in sb.commands[-1][0]
    name = {"claude-code": "CC", "codex": "CODEX"}[harness.name]
    monkeypatch.setenv(f"SLIME_AGENT_{name}_TARBALL", str(tmp_path / "no.tgz"))
    with pytest.raises(UserError, match=f"SLIME_AGENT_{name}_TARBALL=.*there is no such file"):
        asyncio.run(harness().install_cli(sb))
    (tmp_path / "no.tgz").write_bytes(b"x")
    asyncio.run(harness().install_cli(sb))
    assert sb.files == {"/tmp/no.tgz": tmp_path / "no.tgz"} and "/tmp/no.tgz" in sb.commands[-1][0]
