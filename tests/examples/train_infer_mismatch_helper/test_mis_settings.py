import argparse

import pytest

from examples.train_infer_mismatch_helper.mis import mis_settings_from_args
from slime.algorithms.mismatch import MisSettings
from slime.utils.errors import UserError


def test_what_the_arguments_lack_has_its_default():
    args = argparse.Namespace(use_tis=True, custom_config={})
    assert mis_settings_from_args(args) == MisSettings()
    assert not mis_settings_from_args(argparse.Namespace(use_tis=False, custom_config={})).use_tis


def test_what_the_arguments_have_is_read():
    args = argparse.Namespace(
        use_tis=False, use_rs=True, rs_level="geometric", rs_veto_threshold=None, tis_clip=3.0, custom_config={}
    )
    assert mis_settings_from_args(args) == MisSettings(
        use_tis=False, use_rs=True, rs_level="geometric", rs_veto_threshold=None
    )


def test_a_misspelt_setting_is_refused():
    args = argparse.Namespace(use_tis=True, custom_config={"tis_levels": "token", "my_own": 1})
    with pytest.raises(UserError, match="unknown setting tis_levels; did you mean tis_level?"):
        mis_settings_from_args(args)


def test_bad_values_are_refused():
    with pytest.raises(UserError, match="tis_mode is .cut.; expected one of truncate, clip, mask"):
        mis_settings_from_args(argparse.Namespace(use_tis=True, tis_mode="cut", custom_config={}))
