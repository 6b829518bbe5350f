"""Public import path of the dump of what is trained on."""

from slime.training.reports import save_train_data as save_train_data
