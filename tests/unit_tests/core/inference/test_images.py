"""Keys of cached pages that hold image tokens."""

import numpy as np

from megatron.core.inference.images import PlacedImages, PromptImages


def test_keys_of_image_tokens_are_negative_and_depend_on_pixels_and_shape():
    """Token ids are not negative, so that no text has the keys of an image."""
    patches, prompt = np.random.default_rng(1).standard_normal((24, 4), np.float32), [9, *[7] * 6, 8]

    def image_keys(values, height, width):
        images = PromptImages(values, [(height, width)], [(height // 2, width // 2)])
        first, *keys, last = PlacedImages(prompt, images, token=7).key_ids
        assert (first, last) == (9, 8) and max(keys) < 0
        return keys

    wide = image_keys(patches, 4, 6)
    assert wide == image_keys(patches.copy(), 4, 6)
    assert not set(wide) & {*image_keys(patches, 6, 4), *image_keys(patches + 1, 4, 6)}
