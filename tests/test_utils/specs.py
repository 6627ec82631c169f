"""The declarations of a model's parameters, as tests go through them."""


def named_specs(model):
    """(name, parameter, spec) of every parameter, each once."""
    for name, param in model.named_parameters():
        yield name, param, param.spec


def unique_parameter_count(model):
    """Parameters of the global tensors that this model (chunk) holds a part of; copies of tied ones do not count."""
    return sum(spec.numel for _, _, spec in named_specs(model) if spec.tied_to is None)
