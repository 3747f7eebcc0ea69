"""Writes images.npz: what the processors of transformers make of pictures, as Pillow computes it.

Also the logits of `hf/vit_classes` for a JPEG. Needs PyTorch, Pillow and transformers, which the
tests do not: `make_images_golden.py`.
"""

import io
import json
from pathlib import Path

import numpy as np
import PIL.Image
import torch
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
    file = io.BytesIO()
    PIL.Image.fromarray(picture).save(file, "JPEG", quality=90)
    arrays["jpeg"] = np.frombuffer(file.getvalue(), np.uint8)
    folder = Path(__file__).with_name("hf") / "vit_classes"
    model = transformers.ViTForImageClassification.from_pretrained(folder)
    made = transformers.ViTImageProcessorPil(size=dict.fromkeys(("height", "width"), 20))
    with torch.no_grad():
        inputs = made(PIL.Image.open(file), return_tensors="pt")
        arrays["jpeg logits"] = model(**inputs).logits[0].numpy()
    arrays["jpeg processor"] = np.array(json.dumps(made.to_dict()))
    print("logits", arrays["jpeg logits"])
    np.savez_compressed(Path(__file__).with_name("images.npz"), **arrays)


if __name__ == "__main__":
    main()
