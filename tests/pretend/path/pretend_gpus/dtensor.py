"""DTensor's random operators as on a CPU mesh: each rank draws with its own generator. The state of
CUDA's generator, which DTensor takes apart, is not imitated."""


def patch(module):
    module.is_rng_supported_mesh = lambda mesh: False
