"""Long commands: started once, waited for in short calls, ended over budget. In a real sandbox, and in one that loses calls."""

import asyncio

import pytest

from slime.agent import long_commands
from slime.agent.long_commands import EXIT_LOST
from slime.agent.sandbox import EXIT_TIME_BUDGET_EXCEEDED, CommandFailed, LocalSandbox, SandboxError, exec_and_wait


def waited(cmd, before=None, after=None, **options):
    """(what `exec_and_wait` gave, what `after(sandbox)` gives)."""

    async def main():
        async with LocalSandbox() as sb:
            if before is not None:
                await before(sb)
            result = await exec_and_wait(sb, cmd=cmd, **{**OPTIONS, **options})
            return result, await after(sb) if after is not None else None

    return asyncio.run(main())


OPTIONS = {"time_budget_sec": 60, "tag": "work", "poll_interval_sec": 0.05}


def leavings(sb):
    return sb.exec("ls -A tmp")


def test_status_and_both_streams_come_back_and_nothing_is_left():
    (code, output), (_, left, _) = waited("echo one; echo two >&2; exit 7", after=leavings)
    assert (code, output) == (7, "one\ntwo\n") and left == ""


def test_a_command_has_its_directory_variables_and_output_file():
    def kept(sb):
        return sb.read_file("out here")

    (code, output), text = waited(
        'pwd | sed "s/.*slime-sandbox[^/]*//"; echo "$A"',
        before=lambda sb: sb.exec("mkdir 'my work'"),
        after=kept,
        # Its own TMPDIR is none of the run's business.
        env={"A": "it's", "TMPDIR": "/nowhere"},
        workdir="my work",
        out_file="out here",
        want_output=False,
    )
    # The path of the output is one of the sandbox's, not of the command's directory.
    assert (code, output, text) == (0, "", "/my work\nit's\n")


def test_a_directory_that_is_not_there_is_told_as_output():
    (code, output), _ = waited("true", workdir="nowhere")
    assert code != 0 and "nowhere" in output


def test_over_budget_the_group_is_ended_and_the_end_of_the_output_is_there():
    async def still(sb):
        _, pids, _ = await sb.exec("cat pids")
        return [(await sb.exec(f"kill -0 {pid}"))[0] for pid in pids.split()]

    cmd = "trap '' TERM; echo begun; sleep 1000 & echo $! $$ > pids; wait"
    for seconds in (1.5, 30.0):
        (code, output), alive = waited(cmd, after=still, time_budget_sec=seconds)
        assert code == EXIT_TIME_BUDGET_EXCEEDED
        if alive:
            break  # else the machine was too busy for it to come so far
    assert output == "begun\n" and len(alive) == 2 and 0 not in alive


def test_the_same_tag_may_run_again():
    async def main():
        async with LocalSandbox() as sb:
            return [await exec_and_wait(sb, cmd="echo x >> runs; wc -l < runs", **OPTIONS) for _ in range(3)]

    assert [output.strip() for _, output in asyncio.run(main())] == ["1", "2", "3"]


def test_a_command_that_takes_its_launcher_along_is_told_at_once():
    (code, output), _ = waited("echo last words; kill -9 0")
    assert (code, output) == (EXIT_LOST, "last words\n")


def test_what_a_command_leaves_in_its_group_ends_with_it():
    async def ended(sb):
        async with asyncio.timeout(30):
            while (await sb.exec('kill -0 "$(cat left)"'))[0] == 0:
                await asyncio.sleep(0.02)

    (code, _), _ = waited("sleep 77 & echo $! > left", after=ended)
    assert code == 0


@pytest.mark.parametrize("marker", ["", "text", "-", "²", "1 2"])
def test_what_stands_in_the_place_of_a_status_and_is_none_is_a_lost_command(marker):
    cmd = f"cd ../tmp; for file in .slime-*.group; do echo '{marker}' > \"${{file%.group}}.done\"; done; sleep 1000"
    (code, _), _ = waited(cmd, workdir="home")
    assert code == EXIT_LOST


def test_a_start_that_was_broken_off_is_a_lost_command(monkeypatch):
    monkeypatch.setattr(long_commands, "_START_SECONDS", 0.2)

    class Broken(LocalSandbox):
        async def exec(self, cmd, **options):
            # The lock is taken, and then nothing comes.
            return await super().exec(cmd.replace("setsid sh", "exit; setsid sh"), **options)

    async def main():
        async with Broken() as sb:
            return await exec_and_wait(sb, cmd="true", **OPTIONS)

    assert asyncio.run(main()) == (EXIT_LOST, "")


def test_neither_a_command_nor_its_variables_stand_in_command_lines_or_messages():
    asked = []

    class Watched(LocalSandbox):
        async def exec(self, cmd, **options):
            asked.append(cmd)
            return await super().exec(cmd.replace("command -v setsid", "command -v no_setsid"), **options)

    async def main():
        async with Watched() as sb:
            try:
                await exec_and_wait(sb, cmd="echo hidden-word", env={"KEY": "s3cret"}, **OPTIONS)
            finally:
                asked.append((await sb.exec("stat -c %a tmp/.slime-work-*.sh"))[1])

    with pytest.raises(CommandFailed, match="there is no setsid") as error:
        asyncio.run(main())
    told = f"{error.value} {asked}"
    assert "s3cret" not in told and "hidden-word" not in told and asked[-1] == "600\n"


def test_a_command_of_quotes_is_no_longer_than_it_is():
    (code, output), _ = waited("echo done; : " + "''" * 18_000)
    assert (code, output) == (0, "done\n")


class Unsteady(LocalSandbox):
    """Every start arrives, its answer does not, and it is repeated, as by a client that retries."""

    async def exec(self, cmd, **options):
        result = await super().exec(cmd, **options)
        if "setsid" in cmd:
            assert options.get("idempotent", True)
            result = await super().exec(cmd, **options)
        return result


def test_a_start_that_is_repeated_starts_nothing():
    async def main():
        async with Unsteady() as sb:
            await exec_and_wait(sb, cmd="echo x >> runs; sleep 0.3", **OPTIONS)
            return await sb.read_file("runs")

    assert asyncio.run(main()) == "x\n"


def test_a_caller_that_comes_back_gets_the_run_that_is_under_way():
    async def main():
        async with LocalSandbox() as sb:
            cmd = "echo x >> runs; until [ -f go ]; do sleep 0.02; done; wc -l < runs"
            first = asyncio.create_task(exec_and_wait(sb, cmd=cmd, **OPTIONS))
            while (await sb.exec("test -f runs"))[0]:
                await asyncio.sleep(0.01)
            first.cancel()
            await asyncio.wait([first])
            again = asyncio.create_task(exec_and_wait(sb, cmd=cmd, **OPTIONS))
            # Another command by the same name is another one.
            assert await exec_and_wait(sb, cmd="echo other", **OPTIONS) == (0, "other\n")
            await sb.write_file("go", "")
            return await again

    code, output = asyncio.run(main())
    assert (code, output.strip()) == (0, "1")


def test_the_detached_command_is_not_held_by_the_call_that_started_it():
    """Each call is short: none waits for the command."""

    class Timed(LocalSandbox):
        async def exec(self, cmd, **options):
            async with asyncio.timeout(20):
                return await super().exec(cmd, **options)

    async def main():
        async with Timed() as sb:
            return await exec_and_wait(sb, cmd="sleep 1000", **{**OPTIONS, "time_budget_sec": 1})

    assert asyncio.run(main())[0] == EXIT_TIME_BUDGET_EXCEEDED


@pytest.mark.parametrize("tag", ["", "a b", "../x", "ü", "x" * 101])
def test_a_tag_is_a_plain_name(tag):
    with pytest.raises(ValueError, match="give 1 to 100 letters"):
        waited("true", tag=tag)


def test_a_command_is_given_as_a_command():
    with pytest.raises(ValueError, match="write it to a file"):
        waited("#" * 70_000)
    with pytest.raises(ValueError, match="no names of variables"):
        waited("true", env={"A B": "x"})
    (code, output), _ = waited("cat <<'END'\n{it}'s $HOME %s\nEND")
    assert (code, output) == (0, "{it}'s $HOME %s\n")


def test_an_image_that_cannot_start_it_says_so():
    class Bare(LocalSandbox):
        async def exec(self, cmd, **options):
            return await super().exec(cmd.replace("command -v setsid", "command -v no_setsid"), **options)

    async def main():
        async with Bare() as sb:
            await exec_and_wait(sb, cmd="true", **OPTIONS)

    with pytest.raises(CommandFailed, match="there is no setsid"):
        asyncio.run(main())


def test_a_sandbox_that_is_gone_is_an_error_and_no_status():
    async def main():
        async with LocalSandbox() as sb:
            sb._keeper.kill()
            await sb._keeper.wait()
            await exec_and_wait(sb, cmd="true", **OPTIONS)

    with pytest.raises(SandboxError, match="ran no command"):
        asyncio.run(main())
