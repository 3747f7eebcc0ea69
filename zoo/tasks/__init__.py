"""The common parts of recipes of one kind: language models, classifiers, fine-tuning."""
