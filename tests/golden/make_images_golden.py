"""Writes images.npz: what the processors of transformers make of pictures, as Pillow computes it.

Needs PyTorch, Pillow and transformers, which the tests do not: `make_images_golden.py`.
"""

import json
from pathlib import Path

import numpy as np
import transformers

SETTINGS = {
    "ViT": {"size": {"height": 24, "width": 24}},
    "Siglip": {"size": {"height": 20, "width": 28}},
    "Bit": {"size": {"shortest_edge": 30}, "crop_size": {"height": 24, "width": 24}},
    "ViT unscaled": {"do_rescale": False, "do_normalize": False, "do_resize": False},
}


def main() -> None:
    rng, arrays = np.random.default_rng(0), {}
    smooth = rng.random((5, 7, 3)).repeat(9, 0).repeat(7, 1)
    noise = rng.random((45, 49, 3)) / 4
    picture = np.rint(255 * (0.75 * smooth + noise)).astype(np.uint8)
    arrays["picture"] = picture
    for name, changes in SETTINGS.items():
        made = getattr(transformers, f"{name.split()[0]}ImageProcessorPil")(**changes)
        out = made(picture, return_tensors="np")["pixel_values"][0]
        arrays[name] = np.asarray(out).transpose(1, 2, 0)
        arrays[f"{name} settings"] = np.array(json.dumps(made.to_dict()))
        print(name, arrays[name].shape, arrays[name].min(), arrays[name].max())
    np.savez_compressed(Path(__file__).with_name("images.npz"), **arrays)


if __name__ == "__main__":
    main()
