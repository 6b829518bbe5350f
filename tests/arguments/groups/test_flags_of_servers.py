"""Flags of engines and router: our own, and those that the installed packages tell."""

import argparse

import pytest

from slime.arguments import groups as packages
from slime.arguments.groups.run_flags import SERVING


def build() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    SERVING.add_to(parser)
    packages.add_server_flags(parser)
    return parser


@pytest.fixture(scope="module")
def parser():
    return build()


@pytest.mark.parametrize("flag", ["--router-policy", "--sglang-router-policy", "--sglang-router-strategy"])
@pytest.mark.parametrize("policy", ["cache_aware", "round_robin", "random", "power_of_two", "consistent_hashing"])
def test_three_names_of_the_policy(parser, flag, policy):
    assert parser.parse_args([flag, policy]).router_policy == policy


def test_an_unknown_policy_is_refused(parser):
    with pytest.raises(argparse.ArgumentError, match="consistent_hashing"):
        parser.parse_args(["--router-policy", "fastest"])


def test_the_request_timeout_has_one_value_under_both_names(parser):
    assert parser.parse_args(["--router-request-timeout-secs", "60"]).sglang_router_request_timeout_secs == 60
    assert not hasattr(parser.parse_args([]), "router_request_timeout_secs")


def test_packages_bring_their_flags(parser):
    args = parser.parse_args(["--sglang-page-size", "16", "--router-max-idle-secs", "5"])
    assert (args.sglang_page_size, args.router_max_idle_secs) == (16, 5)


def test_without_the_packages_our_own_flags_remain(monkeypatch):
    monkeypatch.setattr(packages, "load_surface", lambda package: None)
    parser = build()
    assert parser.parse_args(["--router-policy", "random"]).router_policy == "random"
    assert parser.parse_known_args(["--sglang-page-size", "16"])[1] == ["--sglang-page-size", "16"]
