"""Import path of the model shape that the arguments describe; only re-exports."""

from slime.scheduling.shape_of_args import expert_layers, linear_attention_layers, model_shape_from_args

__all__ = ["expert_layers", "linear_attention_layers", "model_shape_from_args"]
