"""The train steps of models beside their peers', timed in turn.

python -m benchmarks.run transformer rnn
"""

from typing import Annotated, Literal, get_args

import tyro

from benchmarks.harness import Table, Timing, main
from benchmarks.peak import worthwhile
from benchmarks.peers import example, given, zoo_model
from benchmarks.peers.given import Precision, Remat
from benchmarks.recurrences import times
from benchmarks.steps import Peer, compare
from zoo.mlp import num_flops_per_example
from zoo.rnn import num_flops_per_token as rnn_flops
from zoo.transformer import num_flops_per_token as transformer_flops

Model = Literal["transformer", "rnn", "mlp", "example", "recurrences"]
Name = Literal[
    "handwritten", "zoo", "zoo-scan", "equinox", "flax-nnx", "pytorch", "pytorch-compiled"
]
LIBRARIES = {"equinox": "equinox_documented", "flax-nnx": "flax_nnx"}


def _peers(model: str) -> dict[str, Peer]:
    zoo = {"zoo": Peer(f"zoo_model.{model}")}
    if model == "transformer":
        zoo = {"zoo": zoo["zoo"].given(scan=False), "zoo-scan": zoo["zoo"].given(scan=True)}
    return {
        "handwritten": Peer(f"handwritten.{model}"),
        **zoo,
        **{name: Peer(f"{module}.{model}") for name, module in LIBRARIES.items()},
        "pytorch": Peer(f"pytorch.{model}", {"compiled": False}),
        "pytorch-compiled": Peer(f"pytorch.{model}", {"compiled": True}),
    }


PEERS = {model: _peers(model) for model in ("transformer", "rnn", "mlp")}
PEERS["example"] = {"handwritten": Peer("example.loop"), "zoo": Peer("example.zoo_step")}


def train_steps(
    models: Annotated[tuple[Model, ...], tyro.conf.Positional] = get_args(Model),
    peers: tuple[Name, ...] = get_args(Name),
    precision: tuple[Precision, ...] = (),
    remat: tuple[Remat, ...] = ("none", "full"),
    timing: Timing = Timing(),
    transformer: given.Transformer = given.Transformer(),
    rnn: given.RNN = given.RNN(),
    mlp: given.MLP = given.MLP(),
    digits: example.Shape = example.Shape("digits", batch_size=96),
    dates: example.Shape = example.Shape("dates", batch_size=128),
) -> list[Table]:
    """Time train steps: the zoo's beside those by hand, of Equinox, Flax NNX and PyTorch.

    Args:
        models: models to time.
        peers: peers; the first that runs is the baseline of the ratios.
        precision: precisions of the compute, over fp32 weights; by default the device's own.
        remat: recomputation in the transformer's backward pass: of nothing, or of every layer.
        timing: how the peers take turns.
        transformer: sizes.
        rnn: sizes.
        mlp: sizes.
        digits: the example project's convolutional network, in fp32.
        dates: the example project's encoder-decoder, in fp32.
    """

    def chosen(model: str, **options: Remat) -> dict[str, Peer]:
        return {n: p.given(**options) for n, p in PEERS[model].items() if n in peers}

    tables, precision = [], precision or worthwhile()
    if "transformer" in models:
        sizes = zoo_model.transformer_sizes(transformer, "none", True)
        tokens = transformer.num_tokens
        flops = tokens * transformer_flops(sizes, transformer.seq_len)
        for each in precision:
            for kept in remat:
                title = f"transformer train step, {each}, remat {kept}"
                mine, shape = chosen("transformer", remat=kept), transformer
                tables.append(compare(title, mine, shape, each, timing, flops=flops, tokens=tokens))
    for each in precision:
        if "rnn" in models:
            tokens = rnn.batch_size * rnn.seq_len
            flops = tokens * rnn_flops(zoo_model.rnn_sizes(rnn))
            title, mine = f"LSTM train step, {each}", chosen("rnn")
            tables.append(compare(title, mine, rnn, each, timing, flops=flops, tokens=tokens))
        if "mlp" in models:
            rows = mlp.batch_size
            flops = rows * num_flops_per_example(zoo_model.mlp_sizes(mlp))
            title, mine = f"MLP train step, {each}", chosen("mlp")
            tables.append(compare(title, mine, mlp, each, timing, flops=flops, examples=rows))
    for project in (digits, dates) if "example" in models else ():
        title, mine = f"train step of the example project's {project.network}", chosen("example")
        flops, rows = example.flops(project), project.batch_size
        tables.append(compare(title, mine, project, "fp32", timing, flops=flops, examples=rows))
    return tables + (times(timing=timing) if "recurrences" in models else [])


if __name__ == "__main__":
    main(train_steps)
