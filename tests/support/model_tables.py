"""The flags of every model script, written down by hand: sizes in tables, families as the words they add.

A third source beside the scripts and the published configs. A dash leaves the flag out.
"""

from tests.support.shell_arrays import as_flags

_DENSE = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention --use-rotary-position-embeddings"
)
_MOE = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --moe-grouped-gemm --moe-permute-fusion --moe-router-dtype fp32 "
    "--moe-aux-loss-coeff 0"
)
_SIGMOID = "--moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-enable-expert-bias"
_FROZEN = "--moe-router-bias-update-rate 0 --moe-router-load-balancing-type seq_aux_loss"
_SOFTMAX = "--moe-router-score-function softmax --moe-token-dispatcher-type alltoall --moe-token-drop-policy probs"
_GATED = "--use-gated-attention --attention-output-gate --apply-layernorm-1p --rotary-percent 0.25 --qk-layernorm"
_QWEN3_5 = f"--spec slime_plugins.models.qwen3_5 get_qwen3_5_spec {_GATED}"
_DEEPSEEK = (
    f"{_MOE} {_SIGMOID} {_FROZEN} --multi-latent-attention --qk-layernorm --attention-softmax-in-fp32 --no-rope-fusion "
    "--mscale 1.0 --mscale-all-dim 1.0 --moe-token-dispatcher-type alltoall"
)
_LONG_LLAMA = f"{_DENSE} --max-position-embeddings 131072 --use-rope-scaling --rotary-scaling-factor"
_GLM4 = (
    f"{_DENSE} --spec slime_plugins.models.glm4 get_glm_spec --post-self-attn-layernorm --post-mlp-layernorm "
    "--rotary-interleaved --rotary-percent 0.5 --no-rope-fusion"
)
_GLM4_MOE = (
    f"{_MOE} {_SIGMOID} {_FROZEN} --group-query-attention --add-qkv-bias --rotary-percent 0.5 "
    "--moe-token-dispatcher-type alltoall"
)
_GLM5 = (
    f"{_MOE} {_SIGMOID} {_FROZEN} --spec slime_plugins.models.glm5.glm5 get_glm5_spec --multi-latent-attention "
    "--qk-layernorm --no-position-embedding --enable-experimental --allgather-cp --make-vocab-size-divisible-by 16 "
    "--moe-router-topk-scaling-factor 2.5"
)

FAMILIES = {
    "Q2": f"{_DENSE} --add-qkv-bias",
    "Q3": f"{_DENSE} --qk-layernorm",
    "L3": f"{_DENSE} --max-position-embeddings 8192",
    "L3.1": f"{_LONG_LLAMA} 8.0",
    "L3.2": f"{_LONG_LLAMA} 32.0",
    "G4-9": f"{_GLM4} --add-qkv-bias",
    "G4-32": f"{_GLM4} --max-position-embeddings 32768 --seq-length 32768",
    "MI": f"{_DENSE} --add-qkv-bias --max-position-embeddings 32768 --mtp-num-layers 1",
    "Q35": f"{_DENSE} --position-embedding-type rope {_QWEN3_5}".replace("--use-rotary-position-embeddings ", ""),
    "QM": f"{_MOE} {_SOFTMAX} --qk-layernorm --group-query-attention --rotary-percent 1.0",
    "QN": f"{_MOE} {_SOFTMAX} {_GATED} --group-query-attention --moe-shared-expert-gate "
    "--spec slime_plugins.models.qwen3_next get_qwen3_next_spec",
    "Q35M": f"{_MOE} {_SOFTMAX} {_QWEN3_5} --group-query-attention --moe-shared-expert-gate",
    "Q35V": f"{_MOE} {_SOFTMAX} {_QWEN3_5} --group-query-attention --moe-shared-expert-gate "
    "--custom-model-provider-path slime_plugins.models.qwen3_5_vl.get_qwen3_5_vl_model_provider",
    "GM": _GLM4_MOE,
    "GM-355": f"{_GLM4_MOE} --qk-layernorm --moe-router-topk-scaling-factor 2.5",
    "GL": f"{_MOE} {_SIGMOID} {_FROZEN} --multi-latent-attention --add-qkv-bias --qk-layernorm --no-position-embedding "
    "--no-rope-fusion --make-vocab-size-divisible-by 64 --moe-router-topk-scaling-factor 1.8",
    "G5": _GLM5,
    "DS": f"{_DEEPSEEK} --rotary-scaling-factor 40 --moe-router-num-groups 8 --moe-router-group-topk 4 "
    "--moe-router-topk-scaling-factor 2.5",
    "K2": f"{_DEEPSEEK} --rotary-scaling-factor 32.0 --moe-router-num-groups 1 --moe-router-group-topk 1 "
    "--moe-router-topk-scaling-factor 2.827",
    "K2T": f"{_DEEPSEEK} --rotary-scaling-factor 64.0 --moe-router-num-groups 1 --moe-router-group-topk 1 "
    "--moe-router-topk-scaling-factor 2.827",
    "ML": f"{_DEEPSEEK} --rotary-scaling-factor 1 --moe-router-num-groups 1 --moe-router-group-topk 1 "
    "--moe-router-topk-scaling-factor 2.446 --rotary-percent 1.0 --no-masked-softmax-fusion --moe-token-drop-policy probs",
    "MM": f"{_MOE} {_SIGMOID} --moe-router-load-balancing-type none --group-query-attention --qk-layernorm "
    "--spec slime_plugins.models.minimax_m2 get_minimax_m2_layer_spec --rotary-percent 0.5 --no-rope-fusion "
    "--attention-softmax-in-fp32 --moe-token-dispatcher-type alltoall",
}  # fmt: skip

# name, family | layers, hidden, ffn | heads, groups, head width | epsilon, RoPE base, vocabulary, untied
_DENSE_MODELS = """
qwen2.5-0.5B             Q2     24  896  4864  14  2   -  1e-6  1000000 151936 no
qwen2.5-1.5B             Q2     28 1536  8960  12  2   -  1e-6  1000000 151936 no
qwen2.5-3B               Q2     36 2048 11008  16  2   -  1e-6  1000000 151936 no
qwen2.5-7B               Q2     28 3584 18944  28  4   -  1e-6  1000000 152064 yes
qwen2.5-32B              Q2     64 5120 27648  40  8   -  1e-5  1000000 152064 yes
qwen3-0.6B               Q3     28 1024  3072  16  8 128  1e-6  1000000 151936 no
qwen3-1.7B               Q3     28 2048  6144  16  8 128  1e-6  1000000 151936 no
qwen3-4B                 Q3     36 2560  9728  32  8 128  1e-6  1000000 151936 no
qwen3-4B-Instruct-2507   Q3     36 2560  9728  32  8 128  1e-6  5000000 151936 no
qwen3-8B                 Q3     36 4096 12288  32  8 128  1e-6  1000000 151936 yes
qwen3-14B                Q3     40 5120 17408  40  8 128  1e-6  1000000 151936 yes
qwen3-32B                Q3     64 5120 25600  64  8 128  1e-6  1000000 151936 yes
llama3.1-8B-Instruct     L3.1   32 4096 14336  32  8 128  1e-5   500000 128256 yes
llama3.2-3B-Instruct     L3.2   28 3072  8192  24  8 128  1e-5   500000 128256 no
llama3.2-3B-Instruct-amd L3.2   28 3072  8192  24  8 128  1e-5   500000 128256 no
llama3-8B                L3     32 4096 14336  32  8 128  1e-5   500000 128256 yes
llama3-70B               L3     80 8192 28672  64  8 128  1e-5   500000 128256 yes
glm4-9B                  G4-9   40 4096 13696  32  2   -  1e-5    10000 151552 yes
glm-z1-9B                G4-9   40 4096 13696  32  2   -  1e-5    10000 151552 yes
glm4-32B                 G4-32  61 6144 23040  48  2   -  1e-5    10000 151552 yes
mimo-7B-rl               MI     36 4096 11008  32  8   -  1e-5   640000 151680 yes
qwen3.5-0.8B             Q35    24 1024  3584   8  2 256  1e-6 10000000 248320 no
qwen3.5-4B               Q35    32 2560  9216  16  4 256  1e-6 10000000 248320 no
qwen3.5-9B               Q35    32 4096 12288  16  4 256  1e-6 10000000 248320 yes
qwen3.5-27B              Q35    64 5120 17408  24  4 256  1e-6 10000000 248320 yes
"""

# name, family | expert layers, hidden, ffn | heads, groups, head width | MLA: q rank, kv rank, qk head, rope head, v head
# | experts, top-k, expert width, shared width | epsilon, RoPE base, vocabulary
_MOE_MODELS = """
qwen3-30B-A3B       QM     [1]*48        2048  6144  32  4 128 -    -   -   -  -   128  8  768    - 1e-6  1000000 151936
qwen3-moe-30B-A3B   QM     [1]*48        2048  6144  32  4 128 -    -   -   -  -   128  8  768    - 1e-6  1000000 151936
qwen3-235B-A22B     QM     [1]*94        4096 12288  64  4 128 -    -   -   -  -   128  8 1536    - 1e-6  1000000 151936
qwen3-moe-235B-A22B QM     [1]*94        4096 12288  64  4 128 -    -   -   -  -   128  8 1536    - 1e-6  1000000 151936
qwen3-next-80B-A3B  QN     [1]*48        2048  5120  16  2 256 -    -   -   -  -   512 10  512  512 1e-6 10000000 151936
qwen3.5-35B-A3B     Q35M   [1]*40        2048   512  16  2 256 -    -   -   -  -   256  8  512  512 1e-6 10000000 248320
qwen3.5-35B-A3B-vl  Q35V   [1]*40        2048   512  16  2 256 -    -   -   -  -   256  8  512  512 1e-6 10000000 248320
glm4.5-106B-A12B    GM     [0]*1+[1]*45  4096 10944  96  8 128 -    -   -   -  -   128  8 1408 1408 -     1000000 151552
glm4.5-355B-A32B    GM-355 [0]*3+[1]*89  5120 12288  96  8 128 -    -   -   -  -   160  8 1536 1536 -     1000000 151552
glm4.6-355B-A32B    GM-355 [0]*3+[1]*89  5120 12288  96  8 128 -    -   -   -  -   160  8 1536 1536 -     1000000 151552
glm4.7-355B-A32B    GM-355 [0]*3+[1]*89  5120 12288  96  8 128 -    -   -   -  -   160  8 1536 1536 -     1000000 151552
glm4.7-30B-A3B      GL     [0]*1+[1]*46  2048 10240  20  - 192  768 512 192 64 256  64  4 1536 1536 -     1000000 154880
glm5-744B-A40B      G5     [0]*3+[1]*75  6144 12288  64  - 192 2048 512 192 64 256 256  8 2048 2048 -     1000000 154880
glm5.2-744B-A40B    G5     [0]*3+[1]*75  6144 12288  64  - 192 2048 512 192 64 256 256  8 2048 2048 -     8000000 154880
deepseek-v3         DS     [0]*3+[1]*58  7168 18432 128  - 128 1536 512 128 64 128 256  8 2048 2048 1e-6    10000 129280
deepseek-v3.1       DS     [0]*3+[1]*58  7168 18432 128  - 128 1536 512 128 64 128 256  8 2048 2048 1e-6    10000 129280
deepseek-r1         DS     [0]*3+[1]*58  7168 18432 128  - 128 1536 512 128 64 128 256  8 2048 2048 1e-6    10000 129280
deepseek-v3-20layer DS     [0]*3+[1]*17  7168 18432 128  - 128 1536 512 128 64 128 256  8 2048 2048 1e-6    10000 129280
deepseek-v3-5layer  DS     [0]*3+[1]*2   7168 18432 128  - 128 1536 512 128 64 128 256  8 2048 2048 1e-6    10000 129280
kimi-k2             K2     [0]*1+[1]*60  7168 18432  64  -  64 1536 512 128 64 128 384  8 2048 2048 1e-6    50000 163840
kimi-k2-instruct    K2     [0]*1+[1]*60  7168 18432  64  -  64 1536 512 128 64 128 384  8 2048 2048 1e-6    50000 163840
kimi-k2-thinking    K2T    [0]*1+[1]*60  7168 18432  64  -  64 1536 512 128 64 128 384  8 2048 2048 1e-5    50000 163840
moonlight           ML     [0]*1+[1]*26  2048 11264  16  - 128    - 512 128 64 128  64  6 1408 2816 1e-5    50000 163840
moonlight-16B-A3B   ML     [0]*1+[1]*26  2048 11264  16  - 128    - 512 128 64 128  64  6 1408 2816 1e-5    50000 163840
minimax-m2          MM     [1]*62        3072  1536  48  8 128 -    -   -   -  -   256  8 1536    - 1e-6  5000000 200064
"""

_DENSE_COLUMNS = (
    "--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--num-query-groups", "--kv-channels",
    "--norm-epsilon", "--rotary-base", "--vocab-size",
)  # fmt: skip
_MOE_COLUMNS = (
    "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--num-query-groups", "--kv-channels",
    "--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim",
    "--num-experts", "--moe-router-topk", "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size",
    "--norm-epsilon", "--rotary-base", "--vocab-size",
)  # fmt: skip

# Without layers that predict further tokens; with the routers' expert bias.
PARAMETER_COUNTS = {
    "qwen2.5-0.5B": 494_032_768,
    "qwen3-0.6B": 596_049_920,
    "qwen3-4B": 4_022_468_096,
    "qwen3-8B": 8_190_735_360,
    "llama3-8B": 8_030_261_248,
    "llama3-70B": 70_553_706_496,
    "qwen3-30B-A3B": 30_532_122_624,
    "qwen3-235B-A22B": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
}


def expected_flags() -> dict[str, dict[str, tuple[str, ...]]]:
    """Name of each model script → every flag that it must set, with its values."""
    dense = {row[0]: _dense(row) for row in map(str.split, _DENSE_MODELS.strip().splitlines())}
    return {**dense, **{row[0]: _moe(row) for row in map(str.split, _MOE_MODELS.strip().splitlines())}}


def _dense(row: list[str]) -> dict[str, tuple[str, ...]]:
    untied = {"yes": {"--untie-embeddings-and-output-weights": ()}, "no": {}}[row[-1]]
    return {**as_flags(FAMILIES[row[1]].split()), **_given(_DENSE_COLUMNS, row[2:-1]), **untied}


def _moe(row: list[str]) -> dict[str, tuple[str, ...]]:
    pattern = row[2]
    layers = sum(int(run.split("*")[1]) for run in pattern.split("+"))
    depth = {"--num-layers": (str(layers),), "--moe-layer-freq": (pattern,)}
    return {**as_flags(FAMILIES[row[1]].split()), **depth, **_given(_MOE_COLUMNS, row[3:])}


def _given(columns: tuple[str, ...], cells: list[str]) -> dict[str, tuple[str, ...]]:
    return {flag: (cell,) for flag, cell in zip(columns, cells, strict=True) if cell != "-"}
