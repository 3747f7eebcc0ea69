"""The dense model types whose checkpoints have rotary pairs side by side: Helium and ERNIE 4.5."""

from zoo.hf.llamas import DENSE, INTERLEAVED, PAIRS, SILU, decoder, sizes
from zoo.hf.rules import Fixed, Rotary

HELIUM = decoder(
    model_type="helium",
    architecture="HeliumForCausalLM",
    rules=(
        *sizes(eps=1e-8, kv_heads=20, head_dim=128),
        SILU,
        Rotary(max_seq_len=4096),
        Fixed("attention_bias", False),
        Fixed("mlp_bias", False),
    ),
    tensors=DENSE | INTERLEAVED,
    splits=PAIRS,
)
ERNIE4_5 = decoder(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    rules=(
        *sizes(tied=True, eps=1e-5, kv_heads=2, head_dim=128),
        SILU,
        Rotary(max_seq_len=131072),
        Fixed("use_bias", False),
    ),
    tensors=DENSE | INTERLEAVED,
    splits=PAIRS,
)
