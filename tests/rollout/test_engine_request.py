"""Which router a model name leads to."""

from slime.rollout import engine_request as engine_urls
from slime.rollout.engine_request import get_model_url
from tests.support.models.rollout_args import make_args


def test_unknown_names_lead_to_the_first_router_with_one_warning(caplog):
    engine_urls._warn_once.cache_clear()
    routers = {"actor": ("::1", 5), "reward": ("10.0.0.1", 6)}
    args = make_args("", 5, sglang_model_routers=routers)
    args.sglang_router_ip = "::1"
    assert get_model_url(args, "reward", "/x") == "http://10.0.0.1:6/x"
    assert get_model_url(args, "default") == "http://[::1]:5/generate"
    assert caplog.messages == []
    del args.sglang_model_routers
    assert get_model_url(args, "default", "/x") == "http://[::1]:5/x"
    args.sglang_model_routers = routers
    for _ in range(2):
        assert get_model_url(args, "rewrad") == "http://[::1]:5/generate"
    assert caplog.messages == ["no model is served under the name 'rewrad'; 'actor' is asked. Known: actor, reward"]
