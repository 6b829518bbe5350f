"""`python -m slime.doctor`: reports what is wrong with this installation and this machine, and what to do about it.

Checks are independent. A check that fails is a finding itself, so a broken installation is reported and does not end the
doctor. Facts (`slime.doctor.facts`) are read from the machine; findings (`slime.doctor.findings`) are pure functions of facts.
Secrets are not shown.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping

from slime.doctor import facts, findings
from slime.doctor.findings import OK, WARNING, WRONG, Finding

_DESCRIPTION = """Look at this installation and this machine as a run would need them: versions, GPUs, memory and limits, disks,
ports, Ray, optional packages, variables. Says of each whether it is ok, a warning or wrong, and what to do. Starts nothing and
changes nothing. Exit status: 0 where nothing is wrong, else 1."""


def main(argv: list[str] | None = None) -> int:
    """Print the findings as they come. Returns 0 if nothing is wrong, else 1."""
    parser = argparse.ArgumentParser(prog="python -m slime.doctor", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument(
        "--time-limit", type=float, default=300.0, help="seconds for an import or an answer of Ray (300)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object at the end, in place of lines")
    given = parser.parse_args(argv)
    told: dict[str, list[Finding]] = {}
    for title, check in checks(dict(os.environ), given.time_limit).items():
        if not given.json:
            print(title, flush=True)
        told[title] = []
        for finding in caught(check):
            told[title].append(finding)
            if not given.json:
                print(line_of(finding), flush=True)
    every = [finding.level for listed in told.values() for finding in listed]
    if given.json:
        print(
            json.dumps({title: [dataclasses.asdict(finding) for finding in listed] for title, listed in told.items()})
        )
    else:
        print(f"{every.count(WRONG)} wrong, {every.count(WARNING)} warnings, {every.count(OK)} ok")
    return int(WRONG in every)


def caught(check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of a check, the last of which may be that it failed."""
    try:
        yield from check()
    except Exception as error:
        text = f"this could not be looked at: {type(error).__name__}: {error}"
        yield Finding(WARNING, text, "mend what is wrong above, and look again")


def line_of(finding: Finding) -> str:
    """A finding as text; the remedy has a line of its own, unless nothing is wrong."""
    between = ": " if finding.level == OK else "\n          -> "
    return f"  {finding.level:8s}{finding.text}" + (f"{between}{finding.remedy}" if finding.remedy else "")


def checks(variables: Mapping[str, str], time_limit: float) -> dict[str, Callable[[], Iterable[Finding]]]:
    """The checks by title, in order.

    Args:
        variables: the environment.
        time_limit: time limit of every child process, in seconds.
    """
    if sys.version_info < findings.OLDEST_PYTHON:
        # All other checks would fail because of that.
        return {"versions": lambda: [findings.about_python(sys.version_info[:3], "CPU")]}

    def on_gpus() -> bool:
        """Whether this machine is meant for runs on GPUs, whether or not torch can use them."""
        return variables.get("SLIME_ACCELERATOR") != "cpu" and facts.count_device_files() > 0

    @functools.cache
    def cluster() -> facts.Cluster | None:
        return facts.read_cluster(variables, time_limit)

    def imports() -> Iterator[Finding]:
        for distribution in facts.IMPORTS:
            yield findings.about_import(distribution, facts.import_of(distribution, time_limit))

    def environment() -> Iterator[Finding]:
        from slime.utils import env

        return findings.about_variables(variables, env.warnings_about_names(), refused_values())

    return {
        "versions": lambda: findings.about_packages(facts.read_packages(on_gpus())),
        "devices": lambda: findings.about_devices(facts.read_devices(time_limit), variables),
        "imports": imports,
        "machine": lambda: findings.about_machine(facts.read_machine()),
        "disks": lambda: findings.about_disks(facts.read_disks(variables)),
        "ports": lambda: findings.about_ports(facts.read_listeners(), variables, cluster()),
        "Ray": lambda: [findings.about_cluster(cluster())],
        "optional packages": lambda: findings.about_extras(facts.is_installed, on_gpus()),
        "environment": environment,
    }


def refused_values() -> list[str]:
    """The messages by which a run would refuse values of our environment variables."""
    from slime.utils import env
    from slime.utils.errors import RunError, UserError

    def accelerator() -> None:
        from slime.utils.device import get_accelerator

        if env.forced_accelerator():
            get_accelerator()

    def host() -> None:
        from slime.utils.ports import interface_of

        if env.host_ip_override() or env.prefers_ipv6():
            interface_of(env.host_ip_override() or "::1")

    refused = []
    for read in (
        accelerator, host, env.threads_of_user, env.int4_training_group_size, env.reward_service_key, env.buffer_service_key,
        env.sandbox_lifetime_sec, env.sandbox_rpc_retries, env.node_tarball, functools.partial(env.agent_program, "CC"),
        functools.partial(env.agent_program, "CODEX"),
    ):  # fmt: skip
        try:
            read()
        except (UserError, RunError) as error:
            refused.append(str(error))
        except ImportError:
            # A missing package is a finding of its own.
            continue
    return refused
