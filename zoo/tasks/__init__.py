"""What the recipes of one kind share: language models, classifiers, fine-tuning."""
