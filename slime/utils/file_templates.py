"""File names with `{rollout_id}` in them."""

import glob
import os


def existing_files(template: str) -> list[str]:
    """The files that `template` names for any rollout id, in the order of the ids."""
    try:
        pattern = glob.escape(template).format(rollout_id="*")
    except (KeyError, IndexError, ValueError):
        return []  # such as {rollout_id:04d}, which takes numbers only
    return sorted((path for path in glob.glob(pattern) if os.path.isfile(path)), key=lambda path: (len(path), path))
