import argparse
import dataclasses

import pytest
from sglang_router.router_args import RouterArgs

from slime.arguments.surface import FlagSpec, add_flag, load_surface
from slime.serving.router_flags import OUR_DEFAULTS

SPECS = load_surface("router")


@pytest.fixture(scope="module")
def parser():
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    group = parser.add_argument_group("router")
    for spec in SPECS:
        add_flag(group, spec)
    return parser


def test_every_field_has_a_flag_of_its_name():
    assert [(spec.dest, spec.flags) for spec in SPECS] == [
        (f"router_{field.name}", (f"--router-{field.name.replace('_', '-')}",))
        for field in dataclasses.fields(RouterArgs)
    ]


def test_defaults_are_ours_or_none(parser):
    given = {name: value for name, value in vars(parser.parse_args([])).items() if value is not None}
    assert given == {f"router_{name}": value for name, value in OUR_DEFAULTS.items()}
    assert (given["router_log_level"], given["router_balance_abs_threshold"]) == ("warn", 10)
    assert given["router_balance_rel_threshold"] == 1.2


def test_types_follow_the_annotations_of_the_dataclass(parser):
    words = (
        "--router-cache-threshold 0.5 --router-max-tree-size 7 --no-router-disable-circuit-breaker "
        "--router-prometheus-duration-buckets 1 2.5 --router-request-id-headers a b --router-selector {} "
        '--router-jwt-role-mapping {"a":"admin"} --router-control-plane-api-keys [["i","n","k","admin"]] '
        "--router-prometheus-port 9 --router-policy consistent_hashing"
    )
    args = parser.parse_args(words.split())
    assert (args.router_cache_threshold, args.router_max_tree_size) == (0.5, 7)
    assert args.router_disable_circuit_breaker is False
    assert args.router_prometheus_duration_buckets == [1.0, 2.5]
    assert args.router_request_id_headers == ["a", "b"]
    assert (args.router_selector, args.router_jwt_role_mapping) == ({}, {"a": "admin"})
    assert args.router_control_plane_api_keys == [["i", "n", "k", "admin"]]
    assert (args.router_prometheus_port, args.router_policy) == (9, "consistent_hashing")


def test_help_tells_the_default_of_the_router():
    (spec,) = [spec for spec in SPECS if spec.dest == "router_cache_threshold"]
    assert isinstance(spec, FlagSpec) and spec.help.endswith("[router default: 0.3]")
