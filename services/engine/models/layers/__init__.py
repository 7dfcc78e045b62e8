"""The parts that decoders are composed of: attention, MLPs, norms, linear layers, rotary frequencies."""
