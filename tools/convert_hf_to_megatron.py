#!/usr/bin/env python3
"""tools/convert_hf_to_torch_dist.py, with the flag names of other programs.

python tools/convert_hf_to_megatron.py --hf_model_path MODEL --save_path MODEL_torch_dist
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.command_line import run_tool
from tools.convert_hf_to_torch_dist import main

if __name__ == "__main__":
    run_tool(main, source="--hf_model_path", target="--save_path")
