"""Random proteins with a property that can be computed, and a small model to begin with."""

import random
from pathlib import Path

import jax

import zoo
from zoo import transformer

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
# The tokens of ESM-2, in the order of their ids.
TOKENS = """
<cls> <pad> <eos> <unk> L A G V S E R T I D P K Q N F Y M H W C X B U Z O . - <null_1> <mask>
"""


def is_aromatic(sequence: str) -> bool:
    """Whether more than 15% of the amino acids are aromatic: what the model is to tell."""
    return sum(sequence.count(letter) for letter in "FWY") > 0.15 * len(sequence)


def write_proteins(path: Path, count: int = 600, seed: int = 0) -> None:
    """Random sequences in FASTA, with the property in their headers."""
    rng = random.Random(seed)
    records = []
    for number in range(count):
        sequence = "".join(rng.choices(AMINO_ACIDS, k=rng.randint(20, 60)))
        records.append(f">protein{number} aromatic={is_aromatic(sequence)}\n{sequence}\n")
    path.write_text("".join(records))


def write_base(folder: Path) -> None:
    """A model like ESM-2, small and of random weights, in the files that the real one has."""
    config = transformer.Config(
        vocab_size=33,
        d_model=32,
        num_layers=2,
        num_heads=4,
        d_ff=64,
        mlp="gelu_erf",
        mlp_bias=True,
        max_seq_len=1026,
        causal=False,
        tie_embeddings=True,
        head_bias=True,
        residual=transformer.ResidualConfig(norm="layer", norm_bias=True),
        attention=transformer.AttentionConfig(qkv_bias=True, out_bias=True),
        encoder=transformer.EncoderConfig(mask_id=32, head="transformed"),
    )
    model = transformer.Transformer(config, key=jax.random.key(0))
    zoo.save(folder, model, format="hf")
    (folder / "vocab.txt").write_text("\n".join(TOKENS.split()))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "EsmTokenizer"}')
