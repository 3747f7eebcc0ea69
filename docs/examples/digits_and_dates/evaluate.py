"""Load a published model of either network, and evaluate it on what is held out.

python -m evaluate digits runs/digits/average
"""

import json
import sys
from pathlib import Path

import equinox as eqx
import jax

import data
import losses
import nets
import zoo


def main(network: str, folder: str) -> None:
    """Print the means over the held-out part as JSON."""
    batch_size, loss_fn, read = {
        "digits": (96, losses.digits, data.digits),
        "dates": (128, losses.dates, data.dates),
    }[network]
    run = json.loads((Path(folder).parent / "config.json").read_text())
    like = eqx.filter_eval_shape(
        {
            "digits": lambda key: nets.digits(run["width"], key),
            "dates": lambda key: nets.dates(run["size"], run["num_layers"], key),
        }[network],
        jax.random.key(0),
    )
    model, dataset = zoo.load(folder, like=like), read(batch_size, 0).held_out
    step = zoo.make_eval_step(loss_fn, precision="fp32")
    sums: dict[str, float] = {}
    for k in range(dataset.batches_per_epoch):
        for name, value in step(model, dataset.batch(k))[1].items():
            sums[name] = sums.get(name, 0.0) + float(value)
    weight = sums.pop("tokens")
    print(json.dumps({f"eval_{name}": total / weight for name, total in sums.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
